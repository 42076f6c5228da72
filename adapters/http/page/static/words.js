// The server's machine-readable reasons in words. What is not listed is shown as it is.

/** In the order of a request's life: state, short name, what happens there. */
export const STAGES = [
  ["Waiting", "wait", "waits for a slot"],
  ["LookingUp", "lookup", "looks for the prompt in host memory and on disk"],
  ["Restoring", "restore", "copies keys and values back to the device"],
  ["Compressing", "pflash", "compresses the prompt"],
  ["UnparkingDraft", "unpark", "copies the draft model to the device"],
  ["Prefilling", "prefill", "computes the rest of the prompt"],
  ["Speculating", "speculate", "generates tokens, with or without proposals of a draft"],
  ["Snapshotting", "snapshot", "copies what is worth keeping to host memory and disk"],
  ["Parking", "park", "moves the draft model off the device"],
];

/** States that most requests never enter. */
export const ASIDE = {
  LoadingScorer: "loads the drafter, which will compress the prompt",
  UnloadingScorer: "unloads the drafter: the prompt is compressed",
  Draining: "was cancelled or failed, and waits for work that is still running",
  Recovering: "starts again: the keys and values of its slot were lost",
  Yielding: "gives up its slot and will start again later",
};

export const TIERS = { device: "device", host: "host memory", disk: "disk", none: "nowhere" };

export const PLACES = { device: "on the device", host: "in host memory", disk: "on disk" };

const MISSES = {
  nothing_shared_on_device: "No slot holds a whole block (64 tokens) of the prompt, and no longer part is kept elsewhere.",
  empty_store: "Nothing has been kept yet.",
  too_short: "The prompt is too short to be kept: computing it is quicker than loading it.",
  diverged_at: "The prompt differs from every prompt that is kept.",
  no_checkpoint: "The recurrent state of the model was not kept at this place.",
  recompute_is_quicker: "More was kept, but computing it was quicker than loading it.",
  compression_is_quicker: "More was kept, but compressing the prompt was quicker than loading it.",
  restore_incomplete: "Less could be loaded than was found.",
  scope_off: "The request switched the prefix cache off.",
  no_store: "This server keeps nothing in host memory or on disk.",
};

export function missed(reason) {
  const [name, at] = reason.split(":");
  if (name.startsWith("restore_") && !(name in MISSES)) return `Loading failed (${name.slice(8)}).`;
  const said = MISSES[name] ?? name;
  return at ? `${said.slice(0, -1)}, from token ${Number(at).toLocaleString("en")} on.` : said;
}

const SPECULATION = {
  no_draft: "there is no draft model",
  declined: "the request switched it off",
  one_token: "only one token was asked for",
  never_pays: "a step with proposals takes too long on this machine",
  does_not_pay: "proposals took more time than they saved",
  loss_limit: "proposals had cost as much time as is allowed",
  no_trees: "this model cannot verify trees of proposals",
};

export const unproposed = (reason) => SPECULATION[reason] ?? reason;

export const FINISHES = {
  stop: "done",
  length: "token limit",
  cancelled: "cancelled",
  deadline: "timed out",
  failed: "failed",
  queue_full: "queue full",
  shutdown: "server stopped",
  dead_end: "no valid token",
};
