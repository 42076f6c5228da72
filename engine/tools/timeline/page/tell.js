// Shows the details of the request, event or launch that was chosen.

// --- what is told ---

const heading = (text) => made("h2", text);
function list(pairs) {
  const element = made("dl", null);
  for (const [name, value] of pairs) element.append(made("dt", name), made("dd", said(value)));
  return element;
}
function fieldsOf(things, at) { // what says nothing is left out, once it is many
  const all = things.fields(at);
  return list(all.length < 8 ? all : all.filter(([, value]) => value !== null && value !== "" && value !== false));
}
const pressed = (text, action) => { const button = made("button", text); button.type = "button"; button.addEventListener("click", action); return button; };
const who = (row) => row < 0 ? made("span", "no request") : pressed(`request ${number(data.requests[row])}`, () => choose(row, chosen.event, true));

function tellEvent(event) {
  const box = made("div", null);
  const card = made("div", null, made("b", events.name(event)), ` event ${number(data.seqs[0] + event)}, at ${clock(times[event], true)}, of `, who(data.eventRows[event]), fieldsOf(events, event));
  card.className = "card";
  box.append(card, made("h3", askStart[event + 1] > askStart[event] ? "It led to" : "It led to nothing"));
  for (let ask = askStart[event]; ask < Math.min(askStart[event + 1], askStart[event] + CARDS); ask++) {
    const told = made("div", null, made("b", effects.name(ask)), " for ", who(data.effectRows[ask]));
    told.className = "card";
    if (launchOf.has(ask)) { const launch = launchOf.get(ask); told.prepend(pressed(`launched on lane ${launches.owner[launch]}${data.launches.together[launch] > 1 ? `, ${data.launches.together[launch]} together` : ""}`, () => chooseLaunch(launch)), " "); }
    told.append(fieldsOf(effects, ask));
    box.append(told);
  }
  return box;
}
function tellRow(row) {
  const detail = $("detail"), spent = new Map();
  for (let at = barFirst[row]; at < barFirst[row + 1]; at++) { const bar = barsOf[at], state = data.states[bars.kind[bar]]; spent.set(state, (spent.get(state) || 0) + bars.stop[bar] - bars.start[bar]); }
  detail.replaceChildren(heading(`Request ${number(data.requests[row])}`));
  if (closing[row] >= 0) {
    const told = (name) => effects.field(closing[row], `report.${name}`);
    detail.append(list([["finish", effects.field(closing[row], "finish")], ["prompt tokens", told("prompt_tokens")], ["restored", `${number(told("restored_tokens") || 0)} (${told("tier")})`],
      ...(told("miss") ? [["why no more", told("miss")]] : []), ["answer tokens", told("completion_tokens")]]));
  } else detail.append(made("p", "The trace does not hold the end of this request."));
  detail.append(made("h3", "Time in each state"), list([...spent].map(([state, us]) => [state, clock(us)])));
  if (chosen.event >= 0) { detail.append(made("h3", "Event"), tellEvent(chosen.event)); }
  const [one, other] = [touching.first[row], touching.first[row + 1]], events_ = touching.events.subarray(one, other);
  const at = Math.max(0, events_.indexOf(chosen.event)), from = Math.max(0, Math.min(at - CARDS / 2, events_.length - CARDS));
  const shown = events_.subarray(from, from + CARDS), all = made("ol", null);
  for (const event of shown) {
    const button = pressed(null, () => choose(row, event, true));
    button.append(made("span", clock(times[event])), made("span", events.name(event) + (data.eventRows[event] === row ? "" : data.eventRows[event] < 0 ? " (of the engine)" : ` of request ${number(data.requests[data.eventRows[event]])}`)));
    if (event === chosen.event) button.setAttribute("aria-current", "true");
    all.append(made("li", null, button));
  }
  detail.append(made("h3", shown.length < events_.length ? `Events ${number(from + 1)} to ${number(from + shown.length)} of ${number(events_.length)}` : "Events"), all);
}
function choose(row, event = -1, reveal = false) {
  if (row < 0 || row >= rows) return;
  chosen = { row, event: event >= 0 ? event : touching.events[touching.first[row]] ?? -1, launch: -1 };
  const box = $("rows"), top = row * ROW;
  if (top < box.scrollTop || top + ROW > box.scrollTop + box.clientHeight) box.scrollTop = Math.max(0, top - box.clientHeight / 2);
  if (reveal && chosen.event >= 0 && (times[chosen.event] < view.from || times[chosen.event] > view.to)) pan(times[chosen.event] - (view.from + view.to) / 2);
  tellRow(row);
  const state = chosen.event < 0 ? "" : `, ${events.name(chosen.event)} at ${clock(times[chosen.event])}`;
  $("said").textContent = `Request ${data.requests[row]}${state}`;
  redraw();
}
function chooseLaunch(launch) {
  chosen = { row: chosen.row, event: -1, launch };
  const first = launches.kind[launch], size = data.launches.size[launch], together = data.launches.together[launch], event = launches.first[launch];
  const took = launches.stop[launch] - launches.start[launch], detail = $("detail"), name = effects.name(first);
  detail.replaceChildren(heading(`Launch on lane ${launches.owner[launch]}: ${name}${together > 1 ? ` of ${together}` : ""}`),
    list([["at", clock(launches.start[launch], true)], ["until its last answer", launches.open[launch] ? "not in the trace" : clock(took)]]), made("h3", together > size ? "Requests that joined it" : "Requests in it"));
  for (let ask = first; ask < first + size; ask++) { const card = made("div", null, who(data.effectRows[ask]), fieldsOf(effects, ask)); card.className = "card"; detail.append(card); }
  detail.append(made("h3", "The event that it was launched after"), tellEvent(event));
  $("said").textContent = `Launch on lane ${launches.owner[launch]}, ${name}, ${size} together`;
  redraw();
}
function move(by) { // to the next event of the chosen request
  if (chosen.row < 0) return;
  const all = touching.events.subarray(touching.first[chosen.row], touching.first[chosen.row + 1]);
  const at = Math.min(Math.max(0, all.indexOf(chosen.event) + by), all.length - 1);
  choose(chosen.row, all[at], true);
}
