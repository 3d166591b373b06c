"""One page of everything that evaluations left in folders."""

from ropex.eval.report.page import write_report

__all__ = ["write_report"]
