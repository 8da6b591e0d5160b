"""The ten models of docs/tuning.md: the fields of their ``config.json`` that decide what they cache."""

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("models.json")
MODELS: dict[str, dict[str, Any]] = {name: entry["config"] for name, entry in json.loads(FILE.read_text()).items()}
