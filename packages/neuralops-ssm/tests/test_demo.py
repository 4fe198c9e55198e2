"""The demo: its text, its models, and the command line from the first step to the last line."""

import math
import signal
import subprocess
import sys

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from neuralops.core.suitability import INTERPRETING
from neuralops.ssm.demo import DemoError, __main__, run, text
from neuralops.ssm.demo.baselines import ByteModel
from neuralops.ssm.demo.generate import generate
from neuralops.ssm.demo.mixers import MIXERS
from neuralops.ssm.demo.model import LanguageModel
from neuralops.ssm.demo.train import Settings, Trainer, bits_per_byte

CPU = torch.device("cpu")
SMALL = ["--device", "cpu", "--batch", "2", "--length", "32"]


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A standard library of 60 short files, in which the demo finds its text."""
    root = tmp_path / "library"
    (root / "package" / "tests").mkdir(parents=True)
    for number in range(60):
        folder = root / "package" if number % 2 else root
        body = f"def function_{number}(argument):\n    return argument * {number}\n"
        (folder / f"module_{number}.py").write_bytes(3 * body.encode())
    (root / "package" / "tests" / "test_module.py").write_bytes(b"skipped")
    (root / "data.txt").write_bytes(b"skipped")
    monkeypatch.setattr(text, "standard_library", lambda: root)
    monkeypatch.setattr(run, "GENERATED", 20)
    return root


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def demo(out, *arguments):
    return __main__.main([*SMALL, "--out", str(out), *arguments])


def trainer(library, steps, **changes):
    settings = {"mixer": "hgrn2", "batch": 2, "length": 32, "learning_rate": 8e-3, "seed": 0}
    settings |= {"text": "the library"} | changes
    return Trainer(Settings(**settings), text.load_text(library).train, steps, CPU)


# The text


def test_files_are_learnt_or_held_out(library):
    found = text.load_text(library)
    assert found.heldout_files and found.train_files
    assert not set(found.heldout_files) & set(found.train_files)
    assert len(found.heldout_files) + len(found.train_files) == 60
    for part, names in ((found.train, found.train_files), (found.heldout, found.heldout_files)):
        expected = b"".join((library / name).read_bytes() + b"\0" for name in names)
        assert part.numpy().tobytes() == expected
    assert text.load_text(library).fingerprint == found.fingerprint


def test_split_does_not_depend_on_the_other_files(library):
    before = text.load_text(library)
    (library / "another.py").write_bytes(b"pass\n")
    after = text.load_text(library)
    assert set(before.heldout_files) <= set(after.heldout_files) | {"another.py"}
    assert set(before.train_files) <= set(after.train_files) | {"another.py"}
    assert before.fingerprint != after.fingerprint


def test_text_ends_before_the_limit(library):
    files = text.find_files(library)
    part, names = text.read_files(library, files, 1000)
    assert 0 < part.numel() <= 1000
    assert names == tuple(files[: len(names)])
    assert part.numel() + (library / files[len(names)]).stat().st_size + 1 > 1000


def test_this_python_has_enough_text():
    found = text.load_text(text.standard_library())
    assert found.train.numel() > 4_000_000
    assert found.heldout.numel() > 200_000
    assert not set(found.heldout_files) & set(found.train_files)


def test_no_text_is_an_error(tmp_path):
    with pytest.raises(DemoError, match="holds 0 usable Python files"):
        text.load_text(tmp_path)


def test_windows_come_once_before_any_comes_again():
    windows = text.Windows(torch.arange(101, dtype=torch.uint8), length=10, batch=4, seed=3)
    assert len(windows) == 10
    taken = torch.cat([windows.at(step) for step in range(5)])
    assert taken.shape == (20, 11)
    starts = taken[:, 0].tolist()
    assert sorted(starts[:10]) == sorted(starts[10:]) == list(range(0, 100, 10))
    assert starts[:10] != starts[10:]
    assert torch.equal(taken - taken[:, :1], torch.arange(11, dtype=torch.uint8).expand(20, 11))
    assert torch.equal(windows.seen(2), taken[:8])
    assert windows.seen(5).shape == (10, 11)


# The models that count


def witten_bell(rows, context, byte):
    """Return the probability in plain Python."""
    if context is None:
        return 1 / 256
    order = len(context)
    followers = [
        row[i] for row in rows for i in range(order, len(row)) if row[i - order : i] == context
    ]
    shorter = witten_bell(rows, context[1:] if order else None, byte)
    if not followers:
        return shorter
    different = len(set(followers))
    return (followers.count(byte) + different * shorter) / (len(followers) + different)


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("rows", [[b"abracadabra"], [b"abra\xff", b"cadab"]])
def test_byte_model_is_the_formula(order, rows):
    model = ByteModel(torch.tensor([list(row) for row in rows]).squeeze(0).byte(), order)
    heldout = b"abrabx\xffcad"
    expected = [
        witten_bell(rows, heldout[max(0, i - order) : i], heldout[i]) for i in range(len(heldout))
    ]
    actual = model.probabilities(torch.tensor(list(heldout), dtype=torch.uint8))
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64))
    bits = -sum(map(math.log2, expected)) / len(expected)
    heldout_bits = model.bits_per_byte(torch.tensor(list(heldout), dtype=torch.uint8))
    assert heldout_bits == pytest.approx(bits, rel=1e-12)


def test_byte_model_sums_to_one():
    model = ByteModel(torch.tensor(list(b"abracadabra"), dtype=torch.uint8), 2)
    total = sum(
        model.probabilities(torch.tensor([*b"ab", byte], dtype=torch.uint8))[-1]
        for byte in range(256)
    )
    assert float(total) == pytest.approx(1, rel=1e-12)


# The net


@pytest.mark.parametrize("mixer", sorted(MIXERS))
def test_steps_are_the_forward(mixer):
    torch.manual_seed(0)
    model = LanguageModel(mixer, width=16, hidden=32, layers=2)
    bytes_ = torch.randint(256, (3, 40))
    whole, _ = model(bytes_, model.initial_state(3))
    first, state = model(bytes_[:, :17], model.initial_state(3))
    parts = [first]
    for i in range(17, 40):
        logits, state = model.step(bytes_[:, i], state)
        parts.append(logits.unsqueeze(1))
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mixer", sorted(MIXERS))
def test_no_position_sees_what_follows(mixer):
    torch.manual_seed(0)
    model = LanguageModel(mixer, width=16, hidden=32, layers=2)
    bytes_ = torch.randint(256, (1, 40))
    changed = bytes_.clone()
    changed[:, 20:] = 7
    whole, _ = model(bytes_, model.initial_state(1))
    other, _ = model(changed, model.initial_state(1))
    if mixer == "gla":
        # Which products of matrices it takes depends on all gates of a call; only rounding does.
        torch.testing.assert_close(whole[:, :20], other[:, :20], rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(whole[:, :20], other[:, :20])
    assert not torch.equal(whole[:, 20:], other[:, 20:])


@pytest.mark.parametrize("rows", [1, 4])
def test_bits_per_byte_reads_every_byte(rows):
    torch.manual_seed(0)
    model = LanguageModel("hgrn2", width=16, hidden=32, layers=1)
    heldout = torch.randint(256, (50,), dtype=torch.uint8)
    nats = 0.0
    size = math.ceil(50 / rows)
    for start in range(0, 50, size):
        before = heldout[start - 1] if start else torch.tensor(0, dtype=torch.uint8)
        part = heldout[start : start + size].long()
        inputs = torch.cat((before.view(1).long(), part[:-1])).unsqueeze(0)
        logits, _ = model(inputs, model.initial_state(1))
        chances = logits[0].log_softmax(-1)
        nats -= float(chances.gather(1, part.unsqueeze(1)).detach().sum())
    actual = bits_per_byte(model, heldout, rows=rows, length=7)
    assert actual == pytest.approx(nats / 50 / math.log(2), rel=1e-5)


def test_sample_repeats_and_agrees():
    torch.manual_seed(0)
    model = LanguageModel("hgrn2", width=16, hidden=32, layers=2)
    first, again = (generate(model, b"def ", 30, seed=5) for _ in range(2))
    assert first.text == again.text
    assert first.text[: first.prompt] == b"def "
    assert len(first.text) == 34
    assert first.agrees
    assert generate(model, b"", 3, seed=5).agrees


def test_resumed_training_is_the_uninterrupted_one(library, tmp_path):
    straight, first, second = (trainer(library, 6) for _ in range(3))
    while straight.step < 6:
        straight.advance()
    while first.step < 3:
        first.advance()
    first.save(tmp_path / "checkpoint.pt")
    second.load(tmp_path / "checkpoint.pt")
    while second.step < 6:
        second.advance()
    assert second.losses == straight.losses
    for ours, theirs in zip(second.model.parameters(), straight.model.parameters()):
        assert torch.equal(ours, theirs)


def test_diverging_training_is_an_error(library):
    with pytest.raises(DemoError, match="lower --learning-rate"):
        net = trainer(library, 3)
        net.model.head.weight.data.fill_(math.nan)
        net.advance()


# The command line


def test_trains_resumes_and_repeats(library, out, capsys):
    assert demo(out, "--steps", "3") == 0
    first = capsys.readouterr().out
    assert "backend torch" in first
    assert "step 3/3" in first
    assert "tokens/s" in first
    assert "order 2, interpolated" in first
    assert "by one forward are equal" in first
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")

    assert demo(out, "--steps", "3") == 0
    second = capsys.readouterr().out
    assert "Nothing left to train at step 3" in second
    assert second.partition("Held-out")[2] == first.partition("Held-out")[2]

    assert demo(out, "--steps", "5") == 0
    third = capsys.readouterr().out
    assert "Resuming" in third
    assert "at step 3" in third
    assert "step 5/5" in third

    assert demo(out, "--steps", "3", "--fresh") == 0
    fourth = capsys.readouterr().out
    assert fourth.partition("Held-out")[2] == first.partition("Held-out")[2]


def test_checkpoint_must_match(library, out, capsys):
    assert demo(out, "--steps", "2") == 0
    capsys.readouterr()
    assert demo(out, "--steps", "1", "--seed", "7") == 1
    error = capsys.readouterr().err
    assert "--seed was 0 and is now 7" in error
    assert "it is at step 2, past --steps 1" in error
    assert "--fresh" in error
    (library / "another.py").write_bytes(b"pass\n")
    assert demo(out, "--steps", "2") == 1
    assert "another Python has another library" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", None])
def test_broken_checkpoint(library, out, capsys, content):
    out.mkdir()
    path = out / "checkpoint.pt"
    if content is None:
        torch.save({"other": 1}, path)
    else:
        path.write_bytes(content)
    assert demo(out, "--steps", "2") == 1
    assert "--fresh" in capsys.readouterr().err


def test_interrupt_saves(library, out, capsys, monkeypatch):
    advance = Trainer.advance

    def interrupted(self):
        loss = advance(self)
        if self.step == 2:
            signal.raise_signal(signal.SIGINT)
        return loss

    monkeypatch.setattr(Trainer, "advance", interrupted)
    before = signal.getsignal(signal.SIGINT)
    assert demo(out, "--steps", "4") == run.INTERRUPTED
    assert signal.getsignal(signal.SIGINT) is before
    printed = capsys.readouterr().out
    assert "Stopped at step 2" in printed
    assert "The same command resumes" in printed
    assert demo(out, "--steps", "4") == 0
    assert "at step 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "must be at least 1, got 0"),
        (["--steps", "-3"], "must be at least 1, got -3"),
        (["--steps", "many"], "must be a whole number, got 'many'"),
        (["--batch", "0"], "must be at least 1"),
        (["--length", "1.5"], "must be a whole number"),
        (["--seed", "-1"], "must be from 0 to"),
        (["--learning-rate", "nan"], "must be above 0"),
        (["--learning-rate", "fast"], "must be a number"),
        (["--device", "abacus"], "must be auto, cpu or cuda, got 'abacus'"),
        (["--device", "meta"], "must be auto, cpu or cuda, got 'meta'"),
        (["--mixer", "blender"], "invalid choice: 'blender'"),
        (["--stpes", "3"], "unrecognized arguments: --stpes"),
    ],
)
def test_wrong_options(out, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        demo(out, *arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_cuda_without_cuda(out, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        demo(out, "--device", "cuda")
    assert "finds no CUDA device; use --device cpu" in capsys.readouterr().err


def test_out_that_cannot_be_written(library, tmp_path, capsys):
    path = tmp_path / "file"
    path.write_bytes(b"")
    assert demo(path) == 1
    assert f"cannot write to the folder --out {path}" in capsys.readouterr().err


def test_text_shorter_than_a_batch(library, out, capsys):
    assert demo(out, "--batch", "1000") == 1
    assert "lower --batch or --length" in capsys.readouterr().err


@pytest.mark.skipif(INTERPRETING, reason="Triton serves CPU tensors in its interpreter")
def test_backend_that_cannot_serve(library, out, capsys, monkeypatch):
    monkeypatch.setenv("NEURALOPS_BACKEND", "triton")
    assert demo(out, "--steps", "1") == 1
    assert "not on triton: the tensors are on the CPU" in capsys.readouterr().err


def test_unknown_backend(library, out, capsys, monkeypatch):
    monkeypatch.setenv("NEURALOPS_BACKEND", "abacus")
    assert demo(out, "--steps", "1") == 1
    assert "NEURALOPS_BACKEND" in capsys.readouterr().err


def test_steps_that_differ_fail(library, out, capsys, monkeypatch):
    step = MIXERS["hgrn2"].step

    def forgetful(self, x, state):
        return step(self, x, (state[0], 0.9 * state[1]))

    monkeypatch.setattr(MIXERS["hgrn2"], "step", forgetful)
    assert demo(out, "--steps", "1") == 1
    assert "by one forward are DIFFERENT" in capsys.readouterr().out


def test_missing_extra(out, capsys, monkeypatch):
    monkeypatch.setattr(__main__, "EXTRA", ("a_module_that_is_absent", "rich"))
    assert demo(out) == 1
    error = capsys.readouterr().err
    assert "needs a_module_that_is_absent" in error
    assert "pip install 'neuralops-ssm[demo]'" in error


def test_the_family_does_not_import_its_demo():
    code = (
        "import sys, neuralops.ssm\n"
        "print([m for m in ('neuralops.ssm.demo', 'rich', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("load", "threads", "said"), [(1.6, 2, True), (0.3, 2, False), (9, 1, False)]
)
def test_says_when_other_programs_are_at_work(monkeypatch, load, threads, said):
    from neuralops.ssm.demo import run

    monkeypatch.setattr(run.os, "getloadavg", lambda: (load, 0, 0), raising=False)
    monkeypatch.setattr(run.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(run.torch, "get_num_threads", lambda: threads)
    assert ("OMP_NUM_THREADS=1" in run._others_at_work()) is said
