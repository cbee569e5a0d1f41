"""Wrong usage of the bus commands: exit code 1 or 2, and one line that names key, value and remedy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from streams import cli


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d").mkdir()
    (tmp_path / "x.txt").write_text("hi")
    (tmp_path / "b.parquet").write_bytes(b"\xff" * 100)
    (tmp_path / "ok.jsonl").write_text('{"type":"item","id":"n1","ts":0}\n')
    (tmp_path / "typo.toml").write_text('[kafka]\nbootstap = "x"\n')
    (tmp_path / "bad.toml").write_text("[kafka\n")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("replay missing.jsonl", "there is no log missing.jsonl"),
        ("replay d", "d is a folder without any of behaviors.tsv"),
        ("replay x.txt", "format of x.txt is not known: expected .jsonl"),
        ("replay b.parquet", "b.parquet is not a Parquet file"),
        ("replay ok.jsonl --speed fast", "setting speed = 'fast': a number above 0"),
        ("replay ok.jsonl --speed 0", "setting speed = 0.0: a number above 0"),
        ("replay ok.jsonl --topics foo", "setting topics = 'foo': a replay writes some of candidates"),
        ("replay ok.jsonl --sources some", "'some' is none of carry_over, touched, popular"),
        ("replay ok.jsonl --set kafka.partitions=x", "setting kafka.partitions = 'x': expected a whole number"),
        ("replay ok.jsonl --set partitions", "setting --set = 'partitions': write group.key=value"),
        ("replay ok.jsonl --config no.toml", "setting --config = 'no.toml': there is no such file"),
        ("replay ok.jsonl --config typo.toml", "did you mean kafka.bootstrap?"),
        ("replay ok.jsonl --config bad.toml", "is not TOML"),
        ("topics create --set kafka.partitions=0", "setting kafka.partitions = 0: must be at least 1"),
        ("topics check --set kafka.properties.no.such=1", "kafka.properties.no.such = "),
        (
            "simulate --out no/where.jsonl --preset tiny",
            "setting --out = 'no/where.jsonl': cannot be used: No such file",
        ),
        ("simulate --out o.jsonl --preset none", "one of demo, day"),
        ("log check missing.jsonl", "there is no log missing.jsonl"),
        ("log convert ok.jsonl o.csv", "setting OUT = 'o.csv': ends in .jsonl"),
        ("log convert ok.jsonl no/o.jsonl", "setting OUT = 'no/o.jsonl': cannot be used"),
        ("log convert ok.jsonl ok.jsonl", "ok.jsonl exists; --force replaces it"),
        ("dlq show 17", "setting PARTITION@OFFSET = '17': write it as 0@17"),
    ],
)
def test_one_line_and_exit_code_1(
    command: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["solaris", *command.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    assert ended.value.code == 1
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("solaris: ")
    assert says in last


@pytest.mark.parametrize(
    "command", ["nosuch", "tail", "tail x --limit 0", "--log-level loud topics list", "up --port 0x"]
)
def test_wrong_usage_is_exit_code_2(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["solaris", *command.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "Error" in capsys.readouterr().err


def test_every_command_has_an_example() -> None:
    import typer

    def walk(command, path: str):  # type: ignore[no-untyped-def]
        inner = getattr(command, "commands", None)
        if inner is None:
            yield path, command.help or ""
            return
        for name, c in inner.items():
            yield from walk(c, f"{path} {name}")

    commands = dict(walk(typer.main.get_command(cli.app), "solaris"))
    assert len(commands) > 20
    without = [path for path, text in commands.items() if f"Example: {path}" not in " ".join(text.split())]
    assert without == []
