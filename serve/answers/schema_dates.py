"""The formats of RFC 3339 as regular expressions, to the day: grammars know them only roughly, with
a 29th of February in every year and a leap second in every minute.
"""

from __future__ import annotations

_DAYS = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
# Every fourth year, of the hundreds every fourth.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = f"(?:[0-9]{{4}}-{_DAYS}|{_LEAP_YEAR}-02-29)"
_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
# Without leap seconds, and to the nanosecond, so that no answer is digits for ever.
_TIME = rf"{_HOUR_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:[Zz]|[+-]{_HOUR_MINUTE})"

PATTERNS = {
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
    "time": f"^{_TIME}$",
}
"""Format → the pattern that stands for it."""
