"""WatchState: the outcome of one look, kept for the next: what is new follows from it."""

from msgspec import Struct

from homenode.check.watch.alert import Alert
from homenode.gap import Gap

KIND = "watch"


class WatchState(Struct, frozen=True, kw_only=True):
    """time_s: seconds since 1970 (UTC). domains: tuned VMs that ran. not_read: what could not be
    looked at, with the reason."""

    host: str
    time_s: float
    alerts: tuple[Alert, ...]
    domains: tuple[str, ...] = ()
    not_read: tuple[Gap, ...] = ()


class Changes(Struct, frozen=True, kw_only=True):
    """What differs from the look before, in the order of the alerts."""

    raised: tuple[Alert, ...]
    cleared: tuple[Alert, ...]
    newly_unread: tuple[Gap, ...]

    def __bool__(self) -> bool:
        return bool(self.raised or self.cleared or self.newly_unread)


def changes(before: WatchState | None, now: WatchState) -> Changes:
    """Alerts that are new or gone. An alert whose severity rose is new."""
    old = {} if before is None else {alert.key: alert for alert in before.alerts}
    new = {alert.key: alert for alert in now.alerts}
    known = set() if before is None else set(before.not_read)
    return Changes(
        raised=tuple(
            alert
            for key, alert in new.items()
            if key not in old or old[key].severity != alert.severity
        ),
        cleared=tuple(alert for key, alert in old.items() if key not in new),
        newly_unread=tuple(gap for gap in now.not_read if gap not in known),
    )
