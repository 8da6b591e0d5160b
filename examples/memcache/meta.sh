#!/usr/bin/env bash
# meta.sh [options of meta.py]: one MetaService for all machines of a pool. It keeps the directory of objects in
# memory, and no object. Runs in the foreground; needs memcache_hybrid, but no NPU.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$here/../../.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" "$here/meta.py" "$@"
