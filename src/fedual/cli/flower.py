"""`fedual flower`: what the operator of a site needs at the site."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fedual.errors import InputError, hint, import_optional

Client = Annotated[str, typer.Argument(metavar="CLIENT", help="The client-id of the SuperNode's --node-config.")]
State = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        help="The state-dir of the SuperNode's --node-config.",
        show_default="$FEDUAL_STATE, else ~/.fedual/state",
    ),
]
Experiment = Annotated[str, typer.Argument(metavar="EXPERIMENT", help="As `fedual flower experiments` names it.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

app = typer.Typer(help="At a site on Flower: its key, and the experiments it keeps.", no_args_is_help=True)


@app.command()
def key(client: Client, state_dir: State = None, as_json: Json = False) -> None:
    """Print the site's public key, as a line for the server's list of known keys; it is made if there is none.

    Run it as the user who runs the SuperNode.

    Example: fedual flower key north --state-dir /srv/fedual/state
    """
    import_optional("A site's key", "flwr", "'fedual[flower]'")
    from fedual.flower.identity import identity
    from fedual.flower.node import state_folder

    public = identity(state_folder({"state-dir": state_dir}), client).public
    typer.echo(
        json.dumps({"client": client, "key": public})
        if as_json
        else f'{json.dumps(client, ensure_ascii=False)} = "{public}"'
    )


@app.command()
def experiments(client: Client, state_dir: State = None, as_json: Json = False) -> None:
    """List the experiments that asked this site, with their numbers of messages and rounds.

    Example: fedual flower experiments north --state-dir /srv/fedual/state
    """
    import_optional("A site's state", "flwr", "'fedual[flower]'")
    from fedual.flower.limits import counts_file, read_counts
    from fedual.flower.node import state_folder

    counts = read_counts(counts_file(state_folder({"state-dir": state_dir}), client))
    if as_json:
        rows = [{"experiment": name, "messages": m, "rounds": r} for name, (m, r) in counts.items()]
        typer.echo(json.dumps({"experiments": rows}))
        return
    for name, (messages, rounds) in counts.items():
        typer.echo(f"{name}  {messages} messages, {rounds} rounds")


@app.command("set-aside")
def set_aside(client: Client, experiment: Experiment, state_dir: State = None) -> None:
    """Let a site start an experiment anew: keep its state of an earlier run in another file, and say in which.

    A server whose folder is another one cannot replace a site's state by itself. To go back, rename the file.

    Example: fedual flower set-aside north digits --state-dir /srv/fedual/state
    """
    import_optional("A site's state", "flwr", "'fedual[flower]'")
    from fedual.flower import vault
    from fedual.flower.node import state_folder

    folder = state_folder({"state-dir": state_dir})
    kept = vault.set_aside(folder, experiment, client) if folder.is_dir() else None
    if kept is None:
        raise InputError(f"{folder} has no state of {client!r} in {experiment!r}: see `fedual flower experiments`.")
    typer.echo(f"{experiment!r} is kept in {kept}")


@app.command()
def remove(client: Client, experiment: Experiment, state_dir: State = None) -> None:
    """Remove what this site keeps of an experiment that has ended; if it goes on, the site must be re-admitted.

    Example: fedual flower remove north digits --state-dir /srv/fedual/state
    """
    import_optional("A site's state", "flwr", "'fedual[flower]'")
    from fedual.flower.limits import counts_file, forget, read_counts
    from fedual.flower.node import state_folder

    folder = state_folder({"state-dir": state_dir})
    known = read_counts(counts_file(folder, client))
    if experiment not in known:
        raise InputError(f"No experiment {experiment!r} asked {client!r} in {folder}: {hint(experiment, known)}")
    forget(folder, client, experiment)
    typer.echo(f"removed {experiment!r}")
