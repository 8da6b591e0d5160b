"""``layerflow demo``: the reference engine, cold and from the pool, in three cache shapes."""

from layerflow_cli.demo.run import run_demo

__all__ = ["run_demo"]
