"""RULER's 13 tasks (Hsieh et al. 2024, arXiv:2404.06654) with the parameters of NVIDIA's repository at c3f5e3b."""

from collections.abc import Sequence

from ropex.errors import OptionError
from ropex.eval.ruler import tracking, words
from ropex.eval.ruler.draft import Task
from ropex.eval.ruler.niah import Niah
from ropex.eval.ruler.qa import qa_task


def _niah(name: str, niah: Niah) -> Task:
    return Task(
        name, 128, niah.draft, niah.bounds, niah.grid, needs="essays" if niah.haystack == "essay" else None
    )  # fmt: skip


TASKS = {
    task.name: task
    for task in (
        _niah("niah_single_1", Niah("noise")),
        _niah("niah_single_2", Niah("essay")),
        _niah("niah_single_3", Niah("essay", value="uuids")),
        _niah("niah_multikey_1", Niah("essay", keys=4)),
        _niah("niah_multikey_2", Niah("needle")),
        _niah("niah_multikey_3", Niah("needle", key="uuids", value="uuids")),
        _niah("niah_multivalue", Niah("essay", values=4)),
        _niah("niah_multiquery", Niah("essay", keys=4, queries=4)),
        Task("vt", tracking.TOKENS_TO_GENERATE, tracking.draft, tracking.bounds, tracking.grid),
        Task("cwe", 120, words.cwe, words.cwe_bounds, words.cwe_grid, recurs=True),
        Task("fwe", 50, words.fwe, words.fwe_bounds, words.fwe_grid, recurs=True),
        qa_task("qa_1", "squad"),
        qa_task("qa_2", "hotpot"),
    )
}


def get_tasks(names: Sequence[str] | None) -> list[Task]:
    """The tasks of these names, each once; all 13 for None. Raises OptionError for an unknown one."""
    if names is None:
        return list(TASKS.values())
    for name in names:
        if name not in TASKS:
            raise OptionError(f"unknown RULER task {name!r}: choose from {', '.join(TASKS)}, or all")
    return [TASKS[name] for name in dict.fromkeys(names)]
