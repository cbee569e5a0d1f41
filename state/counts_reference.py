"""`ReferenceCounts`: rolling counts by going through all events. Slow, in memory, and meant to be obviously right."""

from __future__ import annotations

from state.counts import BUCKET_MS, DAY_MS, HOUR_MS, I64, U64, Counts, CountSettings


class ReferenceCounts:
    def __init__(self, settings: CountSettings = CountSettings()) -> None:
        self.settings = settings
        self.events: list[tuple[int, int, int, bool]] = []
        """(user, item, event time, clicked) of every ad shown and every click"""

    def shown(self, user: int, items: U64, ts_ms: int) -> None:
        self.events += [(user, item, ts_ms, False) for item in items.tolist()]

    def clicked(self, user: int, items: U64, ts_ms: int) -> None:
        self.events += [(user, item, ts_ms, True) for item in items.tolist()]

    def lookup(self, users: U64, splits: I64, items: U64, now_ms: I64) -> Counts:
        """users [B], splits [B+1], items [N], now_ms [B]."""
        out = Counts.unknown(len(users), len(items))
        out.known[:] = True
        for b, user in enumerate(users.tolist()):
            asked = int(now_ms[b]) - self.settings.lag_ms
            bucket, hour = asked - asked % BUCKET_MS, asked - asked % HOUR_MS
            own = [e for e in self.events if e[0] == user and asked - DAY_MS < e[2] <= asked]
            out.user_clicked[b] = sum(e[3] for e in own)
            out.user_shown[b] = len(own) - out.user_clicked[b]
            for n in range(int(splits[b]), int(splits[b + 1])):
                item = int(items[n])
                for _, i, ts, clicked in self.events:
                    if i != item or ts >= bucket:
                        continue
                    if ts >= bucket - HOUR_MS:
                        out.item_clicked_hour[n] += clicked
                        out.item_shown_hour[n] += not clicked
                    if ts >= hour - 23 * HOUR_MS:
                        out.item_clicked_day[n] += clicked
                        out.item_shown_day[n] += not clicked
                for _, i, ts, clicked in own:
                    if i == item:
                        out.pair_clicked[n] += clicked
                        out.pair_shown[n] += not clicked
                        if not clicked:
                            out.pair_ts_ms[n] = max(int(out.pair_ts_ms[n]), ts)
        return out
