"""`headway queue recover`: replaces damaged SQLite files of accepted requests by their readable rows."""

from __future__ import annotations

from headway.config import Config
from headway.errors import HeadwayError
from headway.store.batches.sqlite_file import recover_batches
from headway.store.queue.sqlite_jobs import recover_jobs
from headway.store.sqlite.rescue import Recovered


def main(config: Config) -> None:
    """Recover the queue and the batches if they are damaged, and print the result."""
    done = dict[str, Recovered | None]()
    if config.broker.kind == "sqlite":
        done["requests"] = recover_jobs(str(config.broker.sqlite.file))
    if config.batches_dir is not None:
        done["batches"] = recover_batches(config.batches_dir)
    if not any(done.values()):
        raise HeadwayError("Neither the queue nor the batches are damaged.", "There is nothing to recover.")
    for what, recovered in done.items():
        if recovered is not None:
            total, still_open = recovered.counts
            print(f"{total} {what} recovered, {still_open} of them not ended yet.")
            lost = f"At least {recovered.unreadable}" if recovered.unreadable else "No"
            print(f"{lost} rows could not be read; those that an earlier rescue had saved are recovered.")
            print(f"The damaged file is kept as {recovered.aside}.")
