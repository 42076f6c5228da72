// The server's machine-readable reasons in words. What is not listed is shown as it is.

/** In the order of a request's life: state, short name, what happens there. */
export const STAGES = [
  ["Waiting", "wait", "waits for a slot"],
  ["LookingUp", "lookup", "looks for its prompt in host memory and on disk"],
  ["Restoring", "restore", "brings rows back to the device"],
  ["Compressing", "pflash", "compresses the prompt"],
  ["Unparking", "unpark", "brings the draft to the device"],
  ["Prefilling", "prefill", "reads the rest of the prompt"],
  ["Speculating", "speculate", "generates, with proposals of the draft or without"],
  ["Snapshotting", "snapshot", "copies out what is worth keeping"],
  ["Parking", "park", "gives the draft back"],
];

/** States beside that way. */
export const ASIDE = {
  Fetching: "brings the drafter in, to compress its prompt",
  Releasing: "gives the drafter back: what is left of its prompt is known",
  Draining: "drains: cancelled or failed, it waits for what is still in flight",
  Recovering: "recovers: the rows of its slot were lost",
  Yielding: "gives its slot up, to begin anew",
};

export const TIERS = { device: "device", host: "host memory", disk: "disk", none: "nowhere" };

export const PLACES = { device: "on the device", host: "in host memory", disk: "on disk" };

const MISSES = {
  nothing_shared_on_device: "No slot holds a prompt that begins like this one, and nothing longer was kept elsewhere.",
  empty_store: "Nothing was kept yet.",
  too_short: "Too short to be kept: shorter prompts are computed sooner than they are loaded.",
  diverged_at: "It goes on differently from what is kept.",
  no_checkpoint: "The model's state was not kept there, only its rows.",
  recompute_is_quicker: "It was there; computing it anew was quicker than loading it.",
  compression_is_quicker: "It was there; compressing the prompt was quicker than loading it.",
  restore_incomplete: "Loading brought less than was promised.",
  scope_off: "The request asked for no prefix cache.",
  no_store: "Neither host memory nor disk keep anything here.",
};

export function missed(reason) {
  const [name, at] = reason.split(":");
  if (name.startsWith("restore_") && !(name in MISSES)) return `Loading failed (${name.slice(8)}).`;
  const said = MISSES[name] ?? name;
  return at ? `${said.slice(0, -1)}, from token ${Number(at).toLocaleString("en")} on.` : said;
}

const SPECULATION = {
  no_draft: "there is no draft",
  declined: "the request declined",
  one_token: "only one token was asked for",
  never_pays: "a step with proposals takes too long here",
  does_not_pay: "proposals did not pay",
  loss_limit: "proposals cost more than they gave",
  no_trees: "trees are not for this model",
};

export const unproposed = (reason) => SPECULATION[reason] ?? reason;

export const FINISHES = {
  stop: "done",
  length: "length",
  cancelled: "cancelled",
  deadline: "too late",
  failed: "failed",
  queue_full: "queue full",
  shutdown: "shutdown",
  dead_end: "dead end",
};
