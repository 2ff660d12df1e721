"""Looks at all of the data, not only the batch that failed, for values that are out of range."""

from .choose import FailedLoop, Range, evaluated, range_of, scan_chosen
from .readers import STREAM_ROWS
from .sources import sources
from .tally import Column, Scan, scan

__all__ = [
    "STREAM_ROWS",
    "Column",
    "FailedLoop",
    "Range",
    "Scan",
    "evaluated",
    "range_of",
    "scan",
    "scan_chosen",
    "sources",
]
