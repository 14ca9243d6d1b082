"""`afield serve`, `join`, `token`, `status`, `promote` and `rollback`."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from afield.cli.screen import screen
from afield.core.errors import InputError
from afield.core.types import Receipt
from afield.experiments.config import Config, experiment, presets, read

tokens = typer.Typer(help="Tokens of a service: who may join.", no_args_is_help=True)
Keys = Annotated[Path | None, typer.Option(help="Where tokens and keys are (default: FOLDER.keys).")]
Folder = Annotated[Path, typer.Option("--out", help="The run folder: made, or gone on with.")]
Token = Annotated[str | None, typer.Option(help="Default: the environment variable AFIELD_TOKEN.")]
TokenFile = Annotated[Path | None, typer.Option(help="A file that holds the token.")]
Ca = Annotated[Path | None, typer.Option(help="PEM of the authority that signed the server's certificate.")]
FOLDER = Path("runs/service")


def serve(
    config: Annotated[
        str | None, typer.Argument(help="A TOML file or a preset (default: the default experiment).")
    ] = None,
    out: Folder = FOLDER,
    keys: Keys = None,
    strategy: Annotated[str | None, typer.Option(help="NAME, where the config has several.")] = None,
    model: Annotated[
        str | None, typer.Option(help="A network of your own, FILE.py:CLASS; it is run.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The seed of the run.")] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free.", min=0, max=65535)] = 8443,
    cert: Annotated[Path | None, typer.Option(help="PEM of the server's certificate: TLS.")] = None,
    key: Annotated[Path | None, typer.Option(help="PEM of its key.")] = None,
    client_ca: Annotated[
        Path | None, typer.Option(help="Ask every client for a certificate of this authority.")
    ] = None,
    insecure: Annotated[bool, typer.Option(help="Listen beyond this machine without TLS.")] = False,
    lease: Annotated[
        float, typer.Option(help="Seconds that a task may be out without a sign of life.")
    ] = 600.0,
    rate: Annotated[float, typer.Option(help="Requests per second and client.")] = 50.0,
    norm: Annotated[
        float | None, typer.Option(help="Refuse updates further than this from their base.")
    ] = None,
    buffer: Annotated[int, typer.Option(help="MiB that updates on their way in may take.")] = 512,
    fsync: Annotated[
        Literal["update", "batch", "off"], typer.Option(help="When an update is safe.")
    ] = "batch",
    keep: Annotated[
        Literal["needed", "all"], typer.Option(help="Journal: what is needed, or all of it.")
    ] = "needed",
    clip: Annotated[
        float | None, typer.Option(help="Differential privacy: clip updates to this norm.")
    ] = None,
    noise: Annotated[float, typer.Option(help="Its noise, in units of --clip.")] = 1.0,
    delta: Annotated[float, typer.Option(help="Its delta.")] = 1e-5,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Log more.")] = False,
) -> None:
    """Serve an experiment to clients that join over the network; a second start goes on where the first ended."""
    logs(logging.DEBUG if verbose else logging.INFO)
    from afield.experiments.serve import Keeping, first_token, opened
    from afield.runtimes.service.privacy import Privacy
    from afield.runtimes.service.serve import Listen
    from afield.runtimes.service.serve import serve as listen_and_serve
    from afield.runtimes.service.service import Terms

    listen = Listen(host, port, cert, key, client_ca, insecure)
    listen.context()  # keys that do not fit are told before anything is made
    chosen, name = _config(config, out, strategy, seed, settings or [])
    terms = Terms(lease=lease, rate=rate, burst=4 * rate, norm=norm, buffer=buffer)
    privacy = None if clip is None else Privacy(clip, noise, delta)
    safe = keys if keys is not None else keys_of(out)
    with opened(
        chosen, out, safe, name=name, terms=terms, keeping=Keeping(fsync, keep), privacy=privacy, own=model
    ) as parts:
        path, new = first_token(safe)
        why = listen_and_serve(parts, listen, lambda url, _: _greet(url, path, new))
        if why:
            raise InputError(f"the service ended: {why}")


def _greet(url: str, path: Path, new: bool) -> None:
    print(f"serving at {url}", flush=True)
    if path.exists():
        made = "a token was made" if new else "the operator's token is"
        print(f"{made}: {path}", flush=True)
        print(f"join with: afield join {url} --token-file {path} --clients 0-9", flush=True)


def _config(
    name: str | None, out: Path, strategy: str | None, seed: int | None, settings: list[str]
) -> tuple[Config, str]:
    """One run: of the folder where it has one and no other is named, else of the config."""
    there = out / "config.toml"
    if name is None and strategy is None and seed is None and not settings and there.exists():
        from afield.experiments.config import config

        return config(read(there)), out.name
    chosen = name or "default"
    table = read(presets().get(chosen, Path(chosen)))
    if name is None and strategy is None:
        strategy = "fedbuff"
    made = experiment(table, strategy=strategy, seed=seed, settings=settings)
    if len(made.runs) > 1:
        labels = ", ".join(f"{run.label} (seed {run.seed})" for run in made.runs)
        raise InputError(
            f"{chosen} has {len(made.runs)} runs ({labels}): a service is one; choose by --strategy and --seed"
        )
    return made.runs[0], Path(chosen).stem


def join(
    url: Annotated[str, typer.Argument(help="Where the service is, such as https://host:8443.")],
    token: Token = None,
    token_file: TokenFile = None,
    client: Annotated[
        int | None, typer.Option(help="Which client, where the token speaks for several.")
    ] = None,
    clients: Annotated[str | None, typer.Option(help="Several in this process, such as 0-9.")] = None,
    data: Annotated[Path | None, typer.Option(help="Your examples: inputs.npy and targets.npy.")] = None,
    model: Annotated[str | None, typer.Option(help="Your network, FILE.py:CLASS; it is run.")] = None,
    tasks: Annotated[int | None, typer.Option(help="End after so many (per client).", min=1)] = None,
    transport: Annotated[
        Literal["full", "bf16", "int8"], typer.Option(help="How updates are sent.")
    ] = "full",
    zstd: Annotated[bool, typer.Option(help="Pack what is sent.")] = False,
    ca: Ca = None,
    cert: Annotated[Path | None, typer.Option(help="Your certificate (mutual TLS).")] = None,
    key: Annotated[Path | None, typer.Option(help="Its key.")] = None,
    patience: Annotated[
        float | None, typer.Option(help="Give up after so many seconds without a reply.")
    ] = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="A line per update.")] = False,
) -> None:
    """Join a service as a client: train its experiment, or your own network on your own data."""
    logs(logging.INFO if verbose else logging.WARNING)
    from afield.experiments.join import by_config, by_own, take_part
    from afield.runtimes.service.client import Client

    if (data is None) != (model is None):
        raise InputError(
            "--data and --model go together: your examples, and the network that learns from them"
        )
    options: dict[str, Any] = {
        "token": _token(token, token_file),
        "ca": ca,
        "certificate": None if cert is None else (cert, key or cert),
        "transport": transport,
        "zstd": zstd,
        "patience": patience,
    }
    numbers: list[int | None] = [client] if clients is None else list(_numbers(clients))
    sessions = [Client(url, client=number, **options) for number in numbers]
    table = sessions[0].about()["config"]
    if "own" in table and model is None:
        raise InputError(f"this service trains {table['own']}: give --model and --data of your own")
    train = by_config(table) if model is None or data is None else by_own(table, model, data)
    accepted = [0] * len(sessions)
    failed: list[InputError] = []

    def told(receipt: Receipt) -> None:
        logging.getLogger("afield").info(
            "client %d, task %d: %s",
            receipt.client,
            receipt.number,
            receipt.refused or f"version {receipt.version}",
        )

    def one(place: int) -> None:
        try:
            accepted[place] = take_part(sessions[place], train, most=tasks, told=told)
        except InputError as error:
            failed.append(error)

    threads = [threading.Thread(target=one, args=(place,), daemon=True) for place in range(len(sessions))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
    except KeyboardInterrupt:
        for session in sessions:
            session.stop()
        for thread in threads:
            thread.join(5.0)
    print(f"{sum(accepted)} updates were accepted")
    if failed:
        raise failed[0]


def status(
    url: Annotated[str, typer.Argument()], token: Token = None, token_file: TokenFile = None, ca: Ca = None
) -> None:
    """How a service is doing."""
    with _operator(url, token, token_file, ca) as client:
        found = client.status()
    console = screen()
    for name, value in found.items():
        console.print(f"{name:>10}  {value}", highlight=False, markup=False, soft_wrap=True)


def promote(
    url: Annotated[str, typer.Argument()],
    version: Annotated[int | None, typer.Option(help="Default: the newest.")] = None,
    token: Token = None,
    token_file: TokenFile = None,
    ca: Ca = None,
) -> None:
    """Make a version the one that is meant for use: /v1/models/promoted."""
    with _operator(url, token, token_file, ca) as client:
        query = {} if version is None else {"version": version}
        print(f"promoted: version {client.request('POST', '/v1/promote', params=query).json()['promoted']}")


def rollback(
    url: Annotated[str, typer.Argument()], token: Token = None, token_file: TokenFile = None, ca: Ca = None
) -> None:
    """Back to the version that was promoted before."""
    with _operator(url, token, token_file, ca) as client:
        print(f"promoted: version {client.request('POST', '/v1/rollback').json()['promoted']}")


def _operator(url: str, token: str | None, token_file: Path | None, ca: Path | None) -> Any:
    from afield.runtimes.service.client import Client

    return Client(url, _token(token, token_file), ca=ca, patience=10.0)


# -- tokens ---------------------------------------------------------------------------------------------------


@tokens.command("add")
def add(
    out: Folder = FOLDER,
    keys: Keys = None,
    clients: Annotated[str | None, typer.Option(help="For whom: 7, 0-9 or all.")] = None,
    operator: Annotated[bool, typer.Option(help="May also promote, roll back and see all.")] = False,
    certificate: Annotated[Path | None, typer.Option(help="Not a token but this certificate (PEM).")] = None,
    note: Annotated[str, typer.Option(help="What it is for.")] = "",
) -> None:
    """Make a token; it is printed once and kept as a hash."""
    if clients is None and not operator:
        raise InputError("say for whom: --clients 7, --clients 0-9, --clients all, or --operator")
    chosen = None if clients in (None, "all") else list(_numbers(str(clients)))
    der = None
    if certificate is not None:
        import ssl

        try:
            der = ssl.PEM_cert_to_DER_cert(certificate.read_text())
        except (OSError, ValueError) as error:
            raise InputError(f"{certificate} is not a certificate in PEM ({error})") from error
    holder, token = _book(out, keys).add(chosen, operator=operator, note=note, certificate=der)
    print(token if token else f"certificate {holder.id} was added")


@tokens.command("revoke")
def revoke(
    name: Annotated[str, typer.Argument(metavar="ID")], out: Folder = FOLDER, keys: Keys = None
) -> None:
    """End a token; a running service takes note within a second."""
    _book(out, keys).revoke(name)
    print(f"{name} was revoked")


@tokens.command("rotate")
def rotate(
    name: Annotated[str, typer.Argument(metavar="ID")], out: Folder = FOLDER, keys: Keys = None
) -> None:
    """A new token in place of one, which ends."""
    print(_book(out, keys).rotate(name)[1])


@tokens.command("list")
def list_(out: Folder = FOLDER, keys: Keys = None) -> None:
    """Who holds what; tokens themselves are nowhere."""
    for holder in _book(out, keys).holders.values():
        whom = "all" if holder.clients is None else ",".join(map(str, holder.clients))
        state = f"revoked {holder.revoked}" if holder.revoked else "valid"
        role = "operator" if holder.operator else "client"
        print(
            f"{holder.id}  {holder.kind:11}  {role:8}  clients {whom}",
            f"made {holder.made}  {state}  {holder.note}".rstrip(),
            sep="  ",
        )


def _book(out: Path, keys: Path | None) -> Any:
    from afield.runtimes.service.trust import Book

    return Book((keys if keys is not None else keys_of(out)) / "tokens.json")


def keys_of(out: Path) -> Path:
    """Beside the run folder, so that the folder can be handed on without them."""
    return out.with_name(out.name + ".keys")


def _token(token: str | None, file: Path | None) -> str | None:
    if file is not None:
        try:
            return file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise InputError(
                f"{file} cannot be read: {error.strerror}; give --token or another file"
            ) from error
    return token if token is not None else os.environ.get("AFIELD_TOKEN")


def _numbers(text: str) -> range:
    first, dash, last = text.partition("-")
    if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
        raise InputError(f"{text!r} is not a client or a range of them: write 7 or 0-9")
    return range(int(first), int(last if dash else first) + 1)


def logs(level: int) -> None:
    """Structured: one line per event, its time, its place, its text."""
    logging.basicConfig(
        level=level,
        stream=sys.stderr,
        format='{"when":"%(asctime)s.%(msecs)03dZ","level":"%(levelname)s","where":"%(name)s","what":"%(message)s"}',
        datefmt="%Y-%m-%dT%H:%M:%S",
        force=True,
    )
    logging.Formatter.converter = time.gmtime
    for noisy in ("httpx", "httpcore", "uvicorn.error", "hpack", "h2"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
