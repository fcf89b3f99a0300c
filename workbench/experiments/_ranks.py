"""What the sheets of several GPUs share: a claim that was checked on every rank."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.experiment import Check


def on_every_rank(checks: Sequence[Check]) -> Check:
    """Return one claim over the checks of all ranks, in rank order; undecided where it is undecided on one."""
    values = [f"rank {rank}: {c.value}" for rank, c in enumerate(checks)]
    same = len({c.value for c in checks}) == 1
    # A reason known on one rank excuses no other.
    reasons = [c.known for c in checks if c.holds is False]
    return Check(
        f"{checks[0].claim}, on every rank",
        None if any(c.holds is None for c in checks) else all(c.holds for c in checks),
        str(checks[0].value) if same else " | ".join(values),
        reasons[0] if all(reasons) and reasons else "",
    )
