"""``layerflow proxy``."""

from __future__ import annotations

from typing import Annotated

import typer

from layerflow_cli.options import ConfigFile, LogLevel, SettingItems, overrides

_Prefill = Annotated[
    list[str] | None,
    typer.Option(
        "--prefill",
        metavar="URL",
        help="Prefill engine; may be repeated. URL=tcp://host:port names its layerflow server, if not the decoders'.",
    ),
]
_Decode = Annotated[list[str] | None, typer.Option("--decode", metavar="URL", help="Decode engine; may be repeated.")]
_Order = Annotated[
    str | None,
    typer.Option("--order", metavar="ORDER", help="concurrent, prefill-first or decode-first (with /v1/metaserver)."),
]
_Host = Annotated[str | None, typer.Option("--host", metavar="ADDRESS", help="Address that clients connect to.")]
_Port = Annotated[int | None, typer.Option("--port", metavar="N", help="Its port; 0 = any free one.")]
_Origins = Annotated[
    str | None,
    typer.Option("--allowed-origins", metavar="ORIGINS", help="Origins of web pages that may ask (CORS); * = all."),
]


def proxy(
    prefill: _Prefill = None,
    decode: _Decode = None,
    order: _Order = None,
    host: _Host = None,
    port: _Port = None,
    allowed_origins: _Origins = None,
    config: ConfigFile = None,
    log_level: LogLevel = None,
    settings: SettingItems = None,
) -> None:
    """Serve OpenAI's API in front of prefill and decode engines. On SIGTERM open requests finish first.

    Flags override the environment, which overrides the file's section [proxy]. docs/proxy.md says what each order
    sends, and what clients see when an engine dies.

    \b
    Examples:
      layerflow proxy --prefill http://p0:8100 --decode http://d0:8200 --order concurrent
      layerflow proxy --prefill http://p0:8100=tcp://p0:9470 --prefill http://p1:8100=tcp://p1:9470 \\
        --decode http://d0:8200 --host 0.0.0.0 --set proxy.max_recompute_tokens=8192
    """
    flags = overrides(
        settings or [],
        {
            "proxy.prefill": ", ".join(prefill) if prefill else None,
            "proxy.decode": ", ".join(decode) if decode else None,
            "proxy.order": order,
            "proxy.host": host,
            "proxy.port": port,
            "proxy.allowed_origins": allowed_origins,
            "log.level": log_level,
        },
    )
    from layerflow.config.settings import Settings  # noqa: PLC0415 - `--help` stays quick

    wanted = Settings.load(config, flags)

    import anyio  # noqa: PLC0415

    from layerflow.observe.logs import configure as configure_logs  # noqa: PLC0415
    from layerflow.proxy.serve import serve_until_signal  # noqa: PLC0415

    configure_logs(wanted.log.level, wanted.log.format)
    anyio.run(serve_until_signal, wanted.proxy, lambda url: typer.echo(f"layerflow proxy listening on {url}"))
