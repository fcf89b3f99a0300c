"""What the sheets of several GPUs share: a claim that was checked on every rank."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.core.experiment import Check

WORDS = {True: "holds", False: "fails", None: "undecided"}


def on_every_rank(checks: Sequence[Check]) -> Check:
    """Return one claim over the checks of all ranks, in rank order; its value names the ranks where they differ.

    It fails where it fails on one rank, else it is undecided where it is undecided on one.
    """
    found = [c.holds for c in checks]
    apart = len(set(found)) > 1
    values = [f"rank {rank}{f' {WORDS[c.holds]}' * apart}: {c.value}" for rank, c in enumerate(checks)]
    same = not apart and len({c.value for c in checks}) == 1
    # A reason known on one rank excuses no other.
    reasons = [c.known for c in checks if c.holds is False]
    return Check(
        f"{checks[0].claim}, on every rank",
        False if False in found else None if None in found else True,
        str(checks[0].value) if same else " | ".join(values),
        reasons[0] if all(reasons) and reasons else "",
    )
