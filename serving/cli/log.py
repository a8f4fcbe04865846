"""The log of ``hotrow serve``."""

import logging

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")


def set_up_log(level: str, form: str) -> None:
    """Log to standard error, from this level on, as text or as one JSON object per line."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=level.upper())
    if form == "json":
        from pythonjsonlogger.json import JsonFormatter

        fields = ["asctime", "levelname", "name", "message"]
        renamed = {"asctime": "time", "levelname": "level", "name": "logger"}
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter(fields, rename_fields=renamed))
