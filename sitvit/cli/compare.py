"""The verb that compares networks."""

from .. import runtime
from .frame import add_config, make_parser


def compare(arguments: list[str]) -> None:
    """Train, evaluate and compare arms over seeds."""
    parser = make_parser(
        "Compare networks: arms x seeds on one stream, evaluated under one protocol. The same command "
        "continues; several of it, on several machines with one disk, share the cells."
    )
    add_config(parser)
    parser.add_argument("--list", action="store_true", help="name every cell and its state, and make nothing")
    parser.add_argument("--kind", choices=["train", "evaluate", "grid"], help="only these cells")
    parser.add_argument("--cell", metavar="NAME", help="do this one, by name or number of --list")
    parser.add_argument("--dry-run", action="store_true", help="say what it would take, and make nothing")
    parser.add_argument("--report", action="store_true", help="only write the report of what is there")
    options = parser.parse_intermixed_args(arguments)
    from ..compare.cells import cells_of
    from ..compare.settings import ComparisonConfig
    from ..config import load_config

    comparison = load_config(options.config, options.overrides, ComparisonConfig)
    every = cells_of(comparison)
    cells = [cell for cell in every if options.kind in (None, cell.kind)]
    if options.cell is not None:
        from ..compare.work import find_cell

        cells = [find_cell(cells, options.cell)]
    if options.list:
        for number, cell in enumerate(cells):
            runtime.say(f"{number:4} {'done' if cell.is_done() else '-':5} {cell.name}")
        return
    if options.dry_run:
        from ..compare.budget import budget

        what = cells[0].name if len(cells) == 1 else f"{len(cells)} cells"
        runtime.say(f"{what}: {budget(cells).text()}")
        return
    if options.cell is not None:
        from ..compare.work import do

        do(cells[0])
        return
    if not options.report:
        from ..compare.work import work_through

        if runtime.launched_processes() > 1:
            raise ValueError("several processes do one cell together: name it by --cell")
        left = work_through(cells)
        if left:
            raise ValueError(f"{len(left)} cell(s) are left, as said above; the same command continues")
    from ..compare.report import write_comparison

    for path in write_comparison(comparison, every):
        runtime.say(f"look at {path}")
