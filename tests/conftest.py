"""One tiny run, trained once a session; tests read it, or work on a copy.

One thread for everything: the models here are tiny, and two threads are slower than one for them.
"""

from pathlib import Path

import pytest
import torch
from tiny_run import Tiny, write_run_file

from specctl.experiments import timing
from specctl.experiments.verify import verdict

torch.set_num_threads(1)
timing._TRIALS = 4  # no test looks at a time
verdict.FALSE_ALARM_RATE = 1e-9  # rounding decides what is drawn from models that are trained here, so which alarms


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The trained run, to be read only; results may be written to it."""
    folder = tmp_path_factory.mktemp("tiny")
    run = Tiny(write_run_file(folder), folder / "run")
    artefacts = run.artefacts()
    for name in ("aligned", "distilled", "mismatched"):
        artefacts.draft(name)
    artefacts.heads("medusa")
    return run


@pytest.fixture
def tiny_copy(tiny: Tiny, tmp_path: Path) -> Tiny:
    """A copy of the trained run that a test may change."""
    return tiny.copy(tmp_path)
