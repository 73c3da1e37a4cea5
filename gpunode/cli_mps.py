"""`gpunode mps ...`: which commands and options there are; the commands are imported when they run."""

# no `from __future__ import annotations`: Typer reads these annotations as objects

import typer

mps_app = typer.Typer(help="Share GPUs between processes.", no_args_is_help=True, rich_markup_mode=None)
