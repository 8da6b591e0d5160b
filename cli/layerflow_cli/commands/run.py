"""``layerflow run``."""

from __future__ import annotations

from typing import Annotated

import typer

from layerflow_cli.options import (
    BackendName,
    ConfigFile,
    DiskPath,
    Endpoint,
    HttpHost,
    HttpPort,
    LogLevel,
    PoolSize,
    SettingItems,
    overrides,
)


def run(
    config: ConfigFile = None,
    endpoint: Endpoint = None,
    pool_size: PoolSize = None,
    backend: BackendName = None,
    disk_path: DiskPath = None,
    http_host: HttpHost = None,
    http_port: HttpPort = None,
    log_level: LogLevel = None,
    link_gbps: Annotated[
        float | None, typer.Option(metavar="X", help="Emulate a link of X GB/s between engines and arena; 0 = off.")
    ] = None,
    settings: SettingItems = None,
) -> None:
    """Start the server. It stops on SIGTERM or Ctrl-C, after open steps have finished (server.drain_timeout_s).

    Flags override the environment, which overrides the file. Keys marked live in `layerflow config` may be edited in
    the file while the server runs.

    \b
    Examples:
      layerflow run --pool-size 16GiB --disk-path /var/lib/layerflow
      layerflow run --config layerflow.toml --backend mooncake --set transfer.prefetch_layers=2
    """
    flags = overrides(
        settings or [],
        {
            "server.endpoint": endpoint,
            "server.http_host": http_host,
            "server.http_port": http_port,
            "pool.size": pool_size,
            "pool.backend": backend,
            "pool.disk.path": disk_path,
            "pool.link_gbps": link_gbps,
            "log.level": log_level,
        },
    )
    from layerflow.config.settings import Settings  # noqa: PLC0415 - `--help` stays quick

    wanted = Settings.load(config, flags)

    import anyio  # noqa: PLC0415

    from layerflow.observe.logs import configure as configure_logs  # noqa: PLC0415
    from layerflow_cli.serving import serve  # noqa: PLC0415 - pulls the server in

    configure_logs(wanted.log.level, wanted.log.format)
    anyio.run(serve, wanted, config, flags, typer.echo)
