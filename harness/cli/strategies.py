"""`strategies`: which equality each distribution strategy keeps."""

from __future__ import annotations

import click

from harness import inputs
from harness.cli.options import EXIT_CODES, json_option, seed_option, worlds_option
from harness.cli.running import deliver, streams
from harness.report.console import TextConsole

STRATEGIES_EXAMPLES = """\b
Examples:
  zero2-harness strategies
  zero2-harness strategies --world 2,4 --markdown > table.md
"""


@click.command(
    short_help="Every cell of strategy x reduction x accumulation x clipping.",
    epilog=STRATEGIES_EXAMPLES + "\n" + EXIT_CODES,
)
@worlds_option("2,3,4", "Numbers of ranks at which each cell is tried, on every mesh that its strategy has there.")
@click.option("--markdown", is_flag=True, help="Print the tables as Markdown.")
@seed_option
@json_option
def strategies(*, worlds: tuple[int, ...], markdown: bool, seed: int | None, json_path: str | None) -> int:
    """Print which equality each distribution strategy keeps, as a table that was measured here and now.

    Each cell is a run of three steps on gloo ranks, held against one process that sees the whole batch: gradients, the
    joint norm, moments and weights bit for bit where sums are exact; and, in a second table, where sums round. The same
    comparisons as of `verify --subject NAME`, on one scenario for each cell, world and mesh.
    """
    from harness.cells import show
    from harness.cells.campaign import run_cells

    inputs.check_backend("gloo", worlds)
    output = None if json_path is None else inputs.JsonOutput(json_path)
    chosen = inputs.random_seed() if seed is None else seed
    with streams(output) as (out, errors):
        TextConsole(errors if markdown else out).say(f"seed {chosen}")
        result = run_cells(worlds, chosen, show.CellsProgress(errors))
        code = deliver(output, result, result.exit_code)
        show.print_result(out, result, markdown=markdown)
        return code
