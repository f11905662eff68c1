"""What went wrong in a step, where and why: every op of it is looked at."""

from amp.diagnosis.findings import Finding as Finding
from amp.diagnosis.findings import Report as Report

__all__ = ["Finding", "Report"]
