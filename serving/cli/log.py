"""The log of ``hotrow serve``."""

import logging

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")


def set_up_log(level: str, form: str, worker: int | None = None) -> None:
    """Log to standard error, from this level on, as text or as one JSON object per line, with the worker's number."""
    name = "%(name)s" if worker is None else f"worker {worker} %(name)s"
    logging.basicConfig(format=f"%(asctime)s %(levelname)s {name}: %(message)s", level=level.upper())
    if form == "json":
        from pythonjsonlogger.json import JsonFormatter

        fields = ["asctime", "levelname", "name", "message"]
        renamed = {"asctime": "time", "levelname": "level", "name": "logger"}
        for handler in logging.getLogger().handlers:
            of_worker = {} if worker is None else {"worker": worker}
            handler.setFormatter(JsonFormatter(fields, rename_fields=renamed, static_fields=of_worker))
