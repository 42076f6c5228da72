"""The pure core: every request as an explicit state machine, and the world that they share. No I/O, clock or chance.

Begin with `request_states.py`, `generate.py`, `table.py` and `world.py`, in this order. Imports `effects` only. The
folder is flat, because its modules are one machine. By subject:

* The machine: `machine.py`, `table.py`, `events.py`, `invariants.py`, `diagram.py`.
* All requests together: `world.py`, `settings.py`.
* One request: `request_states.py`, `phases.py`, `reports.py`, and its transitions, by the states that they leave:
  `lookup.py`, `restore.py`, `compress.py`, `generate.py`, `request_end.py`, `recover.py`.
* Which request gets which slot and memory: `slots.py`, `slot_admission.py`, `followers.py`, `pages.py`,
  `page_growth.py`.
* What runs next, and together with what: `lane.py`, `launch_choice.py`, `mixed_launch.py`, `prompt_choice.py`,
  `pacing.py`.
* Which rows are kept, found, loaded or computed: `policy.py` (the planner is there), `kept_rows.py`, `sequences.py`,
  `scope.py`, `checkpoints.py`.
* How much is proposed: `speculation_plan.py`, `speculation_control.py`, `suffix_control.py`, `copy_choice.py`,
  `copy_branches.py`, `copy_records.py`.
* How long things take: `rates.py`, `measured_rates.py`, `step_prices.py`.
* Where weights are: `residency.py`, `experts.py`.
* Which replica of a fleet serves a request: `routing/`.
"""
