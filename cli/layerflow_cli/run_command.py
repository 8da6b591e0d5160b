"""``layerflow run``."""

from __future__ import annotations

from typing import Annotated

import typer

from layerflow_cli.options import ConfigFile, Endpoint, overrides


def run(
    config: ConfigFile = None,
    endpoint: Endpoint = None,
    pool_size: Annotated[str | None, typer.Option(metavar="SIZE", help="Bytes of the arena, e.g. 4GiB.")] = None,
    http_port: Annotated[
        int | None, typer.Option(metavar="N", help="Port of /healthz, /metrics, /status; 0 = any free one, -1 = off.")
    ] = None,
    link_gbps: Annotated[
        float | None, typer.Option(metavar="X", help="Emulate a link of X GB/s between engines and arena; 0 = off.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting; may be repeated.")
    ] = None,
) -> None:
    """Run the server until SIGTERM or Ctrl-C, then let open steps finish.

    Tuning keys of the file take effect while it runs; `layerflow config` lists them.

    \b
    Example:
      layerflow run --config layerflow.toml --pool-size 4GiB --set transfer.prefetch_layers=2
    """
    flags = overrides(
        settings or [],
        {
            "server.endpoint": endpoint,
            "pool.size": pool_size,
            "server.http_port": http_port,
            "pool.link_gbps": link_gbps,
        },
    )
    from layerflow.config.settings import Settings  # noqa: PLC0415 - `--help` stays quick

    wanted = Settings.load(config, flags)

    import anyio  # noqa: PLC0415

    from layerflow.observe.logs import configure as configure_logs  # noqa: PLC0415
    from layerflow_cli.serving import serve  # noqa: PLC0415 - pulls torch in

    configure_logs(wanted.log.level, wanted.log.format)
    anyio.run(serve, wanted, config, flags, typer.echo)
