"""Finding which op of a step made an inf or NaN, where and why, by watching every op."""

from amp.diagnosis.findings import Finding as Finding
from amp.diagnosis.findings import Report as Report

__all__ = ["Finding", "Report"]
