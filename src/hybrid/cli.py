"""The `hybrid` command: each subcommand is one verb of `hybrid.project.Project`, and no logic."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from hybrid import __version__, cli_audit, cli_plan, cli_runs, cli_scale
from hybrid.cli_common import DEFAULT, AsJson, Config, Sets, err, out
from hybrid.cli_common import open_project as _open
from hybrid.cli_common import show as _print
from hybrid.config import read_mapping
from hybrid.errors import ConfigError, HybridError
from hybrid.show import Bars, age, percent, short

app = typer.Typer(
    name="hybrid",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train one base, specialise it many times, serve all of it, and run agents on top.",
    epilog="Start with `hybrid demo`. Every command takes --help.",
)
agents_app = typer.Typer(no_args_is_help=True, help="The agents: list, show, add, remove.")
models_app = typer.Typer(no_args_is_help=True, help="The registry: list, show, verify, alias.")
app.add_typer(agents_app, name="agents")
app.add_typer(models_app, name="models")
app.command("runs", epilog="Example: hybrid runs")(cli_runs.runs)
app.command("report", epilog="Example: hybrid report legal-0123456789ab")(cli_runs.report)


@app.command(epilog="Example: hybrid demo")
def demo(
    config: Annotated[
        Path, typer.Option("-c", "--config", help="The project file of the demo.")
    ] = Path("examples/legal/hybrid.yaml"),
    as_json: AsJson = False,
) -> None:
    """Everything on this machine: train, specialise, serve, ask, add a specialist, lose a host."""
    from hybrid.demo import run

    result = run(_open(config), err if as_json else out)
    if as_json:
        _print(result, True)


@app.command(epilog="Example: hybrid train -c examples/legal/hybrid.yaml --set training.steps=50")
def train(
    config: Config = DEFAULT,
    sets: Sets = None,
    fresh: Annotated[bool, typer.Option(help="Ignore earlier checkpoints and results.")] = False,
    check: Annotated[
        bool, typer.Option(help="Make the preflight checks and nothing else.")
    ] = False,
    try_strategies: Annotated[
        bool,
        typer.Option(help="Time the strategies on the real workers, and nothing else."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train and publish the base; a killed run goes on where it stopped."""
    p = _open(config, sets)
    if check:
        cli_runs.preflight(p, as_json)
        return
    if try_strategies:
        cli_runs.try_strategies(p, as_json)
        return
    with Bars(err) as bars:
        manifest = p.train(fresh=fresh, on_progress=bars.training)
    _print(
        manifest.model_dump(mode="json", exclude={"files"}),
        as_json,
        f"published [bold]{manifest.name}@v{manifest.version}[/] {short(manifest.digest)}"
        f"  {_metrics(manifest.metrics)}",
    )


@app.command(epilog="Example: hybrid specialise --only citation,jurisdiction")
def specialise(
    names: Annotated[list[str] | None, typer.Argument(help="Adapters; all if none.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="The same, as a list: --only a,b (repeatable).")
    ] = None,
    config: Config = DEFAULT,
    sets: Sets = None,
    base: Annotated[str | None, typer.Option(help="Base to train on; default: the served.")] = None,
    force: Annotated[bool, typer.Option(help="Publish even below the majority class.")] = False,
    fresh: Annotated[bool, typer.Option(help="Forget what is partly trained.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train, judge and publish adapters, and add them to the served release."""
    p = _open(config, sets)
    listed = [name.strip() for item in only or [] for name in item.split(",") if name.strip()]
    if only and not listed:
        raise ConfigError("--only: expected names of adapters, e.g. --only citation,jurisdiction")
    wanted = list(dict.fromkeys([*(names or []), *listed])) or None
    with Bars(err) as bars:
        done = p.specialise(
            wanted, base=base, force=force, fresh=fresh, on_progress=bars.specialising
        )
    table = Table("adapter", "version", "digest", "majority", "base", "specialist", "macro-F1")
    for name, m in done.items():
        metrics = m.metrics
        table.add_row(
            name,
            f"v{m.version}",
            short(m.digest),
            percent(metrics.get("majority")),
            percent(metrics.get("base_exact", metrics.get("base_recall_1"))),
            percent(metrics.get("exact", metrics.get("recall_1"))),
            percent(metrics.get("macro_f1")),
        )
    data = {n: m.model_dump(mode="json", exclude={"files"}) for n, m in done.items()}
    _print(data, as_json, table)


@app.command(epilog="Example: hybrid up && hybrid ask 'Delaware County Juvenile Court'")
def up(config: Config = DEFAULT, sets: Sets = None, as_json: AsJson = False) -> None:
    """Serve the release and start the agents, in the background."""
    p = _open(config, sets)
    with err.status("starting") as status:
        url = p.up(on_step=lambda text: status.update(text))
    _print({"url": url}, as_json, f"up at [bold]{url}[/]  (`hybrid down` stops it)")


@app.command(epilog="Example: hybrid down")
def down(config: Config = DEFAULT, as_json: AsJson = False) -> None:
    """Stop serving, the agents and the local cluster; queued tasks are kept."""
    p = _open(config)
    with err.status("stopping"):
        ran = p.down()
    _print({"stopped": ran}, as_json, "stopped" if ran else "nothing was running")


@app.command(epilog="Example: hybrid status --json")
def status(config: Config = DEFAULT, as_json: AsJson = False) -> None:
    """What runs: cluster, endpoint, release, hosts."""
    data = _open(config).status()
    table = Table(show_header=False)
    for key in ("project", "url", "cluster", "release", "swarm"):
        value = data.get(key)
        table.add_row(key, value if isinstance(value, str) else json.dumps(value, indent=1))
    _print(data, as_json, table)


@app.command(epilog="Example: hybrid ask --agent citation 'F.2d.'")
def ask(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    agent: Annotated[str | None, typer.Option(help="Whom; default: the front agent.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait.")] = 60,
    config: Config = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Ask an agent over HTTP."""
    p = _open(config)
    view = p.ask(question, agent=agent, timeout_s=timeout)
    if as_json:
        _print(view, True)
    elif view["state"] == "done":
        result = view["result"]
        answer = result.get("answer", result) if isinstance(result, dict) else result
        by = (
            f"  [dim]{result['agent']}[/]" if isinstance(result, dict) and "agent" in result else ""
        )
        out.print(answer if isinstance(answer, str) else json.dumps(answer), by, sep="")
    if view["state"] != "done":
        why = escape(view["error"] or "not finished")
        err.print(f"[red]{view['state']}[/]: {why} (task {view['id']})")
        raise typer.Exit(11)


@agents_app.command("list", epilog="Example: hybrid agents list")
def agents_list(config: Config = DEFAULT, as_json: AsJson = False) -> None:
    """Every agent."""
    data = _open(config).agents()
    table = Table("agent", "behaviour", "adapter", "owner", "description")
    for a in data:
        spec = a["spec"]
        table.add_row(
            a["name"], spec["behaviour"], spec["adapter"] or "-", a["owner"], spec["description"]
        )
    _print(data, as_json, table)


@agents_app.command("show", epilog="Example: hybrid agents show citation")
def agents_show(name: str, config: Config = DEFAULT, as_json: AsJson = False) -> None:
    """One agent: its spec and its mailbox."""
    _print(_open(config).agent(name), True)


@agents_app.command("add", epilog="Example: hybrid agents add entities entities.agent.yaml")
def agents_add(
    name: str,
    file: Annotated[Path, typer.Argument(help="YAML of the agent's spec.")],
    config: Config = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Add an agent, or replace its spec, while everything runs."""
    data = _open(config).add_agent(name, read_mapping(file))
    _print(data, as_json, f"added [bold]{data['name']}[/] version {data['version']}")


@agents_app.command("remove", epilog="Example: hybrid agents remove entities")
def agents_remove(name: str, config: Config = DEFAULT, as_json: AsJson = False) -> None:
    """Remove an agent."""
    _open(config).remove_agent(name)
    _print({"removed": name}, as_json, f"removed {name}")


@agents_app.command("dead", epilog="Example: hybrid agents dead citation")
def agents_dead(name: str, config: Config = DEFAULT, as_json: AsJson = False) -> None:
    """An agent's dead letter: tasks that were given up, and why."""
    data = _open(config).dead_letter(name)
    table = Table("task", "attempts", "error", "input")
    for task in data:
        shown = json.dumps(task["input"], ensure_ascii=False)
        table.add_row(task["id"], str(task["attempts"]), escape(task["error"]), escape(shown[:60]))
    _print(data, as_json, table)


@agents_app.command("replay", epilog="Example: hybrid agents replay 5d0e… --timeout 60")
def agents_replay(
    task: Annotated[str, typer.Argument(help="Id of a dead task.")],
    timeout: Annotated[float | None, typer.Option(help="Seconds until its new deadline.")] = None,
    config: Config = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Try a dead task again, from its last finished step."""
    data = _open(config).replay(task, timeout_s=timeout)
    _print(data, as_json, f"task {data['id']} is {data['state']}")


@models_app.command("list", epilog="Example: hybrid models list")
def models_list(config: Config = DEFAULT, as_json: AsJson = False) -> None:
    """Everything published, and what is served."""
    data = _open(config).models()
    table = Table("kind", "name", "version", "digest", "base", "age", "served", "metrics")
    for m in data:
        table.add_row(
            m["kind"],
            m["name"],
            f"v{m['version']}",
            short(m["digest"]),
            short(m["base_digest"]),
            age(m["created"]),
            "yes" if m["served"] else "",
            _metrics(m["metrics"]),
        )
    _print(data, as_json, table)


Kind = Annotated[str, typer.Option(help="base or adapter.")]


@models_app.command("show", epilog="Example: hybrid models show legal-base@v1")
def models_show(
    ref: str, kind: Kind = "base", config: Config = DEFAULT, as_json: AsJson = False
) -> None:
    """One manifest: files, lineage, metrics."""
    registry = _open(config).registry
    _print(registry.resolve(ref, kind=_kind(kind)).manifest.model_dump(mode="json"), True)


@models_app.command("verify", epilog="Example: hybrid models verify legal-base")
def models_verify(
    ref: str, kind: Kind = "base", config: Config = DEFAULT, as_json: AsJson = False
) -> None:
    """Read every byte of a published model again and compare its digests."""
    m = _open(config).registry.verify(ref, kind=_kind(kind))
    data = {"verified": f"{m.name}@v{m.version}", "digest": m.digest, "files": len(m.files)}
    _print(data, as_json, f"{m.name}@v{m.version}: {len(m.files)} files as published")


@models_app.command("alias", epilog="Example: hybrid models alias legal-base good 2")
def models_alias(
    name: str,
    alias: str,
    version: int,
    kind: Kind = "base",
    config: Config = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Point an alias at a version."""
    _open(config).registry.set_alias(_kind(kind), name, alias, version)
    _print(
        {"name": name, "alias": alias, "version": version}, as_json, f"{name}@{alias} = v{version}"
    )


@app.command(epilog="Example: hybrid doctor")
def doctor(config: Config = DEFAULT, as_json: AsJson = False) -> None:
    """Whether this machine has what the project needs."""
    from hybrid.doctor import examine

    findings = examine(config)
    table = Table("check", "", "finding")
    for f in findings:
        colour = {"ok": "green", "warn": "yellow", "bad": "red"}[f.level]
        table.add_row(f.check, f"[{colour}]{f.level}[/]", escape(f.text))
    _print([vars(f) for f in findings], as_json, table)
    if any(f.level == "bad" for f in findings):
        raise typer.Exit(1)


app.command("audit", epilog=cli_audit.EPILOG)(cli_audit.audit)
app.command("advise", epilog=cli_plan.EPILOG)(cli_plan.advise)
app.command("scale", epilog=cli_scale.SCALE_EPILOG)(cli_scale.scale)
app.command("profile", epilog=cli_scale.PROFILE_EPILOG)(cli_scale.profile)


@app.command()
def version() -> None:
    """Print the version."""
    out.print(__version__)


def _kind(value: str) -> Any:
    if value not in ("base", "adapter"):
        raise ConfigError(f"--kind {value}: allowed are base and adapter")
    return value


def _metrics(metrics: dict[str, Any]) -> str:
    keys = ("eval_loss", "exact", "macro_f1", "majority", "base_exact", "recall_1", "tokens_per_s")
    return "  ".join(f"{k} {metrics[k]:.3g}" for k in keys if metrics.get(k) is not None)


def main() -> None:
    """Entry point: a HybridError is one red line and its exit code; Ctrl-C is 130."""
    try:
        app()
    except HybridError as e:
        err.print(f"[red]{e.code}[/]: {escape(e.message)}", highlight=False)
        sys.exit(e.exit_code)
    except KeyboardInterrupt:
        err.print("interrupted")
        sys.exit(130)


if __name__ == "__main__":
    main()
