"""`penstock generate` and `penstock chat`, with a small model and tokenizer in a folder."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.fewer import long
from tests.generate.decoders import decoder
from tests.processes import free_port, run_python

Run = Callable[..., tuple[int, str, str]]
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
PROMPTS = ["w3 w4 w5", "w9", "w10 w11 w12 w13 w14 w15", "w20 w21", "w22 w23 w24"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    words = {"<unk>": 0, "user": 1, "assistant": 2, **{f"w{index}": index for index in range(3, 120)}}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    decoder("llama").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def encoding(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder-decoder with the same tokenizer."""
    path = tmp_path_factory.mktemp("encoding")
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(path)
    model = decoder("bart")
    model.generation_config.num_beams, model.generation_config.early_stopping = 4, True
    model.save_pretrained(path)
    return path


def answers(folder: Path, prompts: list[str], count: int, kind: Any = transformers.AutoModelForCausalLM) -> list[str]:
    """What transformers writes after each prompt, with the space between them; an encoder's prompt is not continued."""
    model = kind.from_pretrained(folder).eval()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    found = []
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        encodes = model.config.is_encoder_decoder
        made = model.generate(ids, max_new_tokens=count, do_sample=False, num_beams=1)[0]
        continued = "" if encodes else tokenizer.decode(ids[0], skip_special_tokens=True)
        whole = tokenizer.decode(made[1:] if encodes else made, skip_special_tokens=True)
        found.append(str(whole.removeprefix(continued)))
    return found


def test_prompts_of_a_file_are_answered_in_order_and_continued(penstock: Run, folder: Path, tmp_path: Path) -> None:
    file, output, said = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl", tmp_path / "said.json"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    words = ("generate", f"hf:{folder}", "--file", file, "-o", output, "--max-new-tokens", 9, "--set", "slots=2")
    assert penstock(*words, "--json", said)[0] == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == PROMPTS
    assert [row["text"] for row in rows] == answers(folder, PROMPTS, 9)
    assert json.loads(said.read_text())["num_tokens"] == 45
    # the last row was cut off: it and the one before it are written again
    whole = output.read_text()
    output.write_text("".join(line + "\n" for line in whole.splitlines()[:3]) + '{"prompt": "w2')
    assert penstock(*words, "--stages", 3)[0] == 0
    assert output.read_text() == whole
    # nothing is left to do
    assert penstock(*words)[0] == 0
    assert output.read_text() == whole
    # other answers do not come behind these
    status, _, err = penstock(*words, "--temperature", 0.7, "--set", "seed=1")
    assert (status, "sampling" in err) == (2, True)
    status, _, err = penstock("generate", f"hf:{folder}", "-p", "w9", "-o", output)
    assert (status, "these prompts" in err) == (2, True)
    assert output.read_text() == whole


@pytest.mark.parametrize("kind", ["jsonl", long("csv")])
def test_a_prompt_that_cannot_be_answered_is_a_row(penstock: Run, folder: Path, tmp_path: Path, kind: str) -> None:
    file, output, said = tmp_path / "prompts.jsonl", tmp_path / f"answers.{kind}", tmp_path / "said.json"
    asked = [PROMPTS[0], " ".join(["w5"] * 70), PROMPTS[1], "", PROMPTS[2]]
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in asked))
    words = ("generate", f"hf:{folder}", "--file", file, "-o", output, "--max-new-tokens", 9, "--max-length", 64,
             "--json", said)  # fmt: skip
    wanted = answers(folder, PROMPTS[:3], 9)
    for first in (True, False):  # the second time nothing is left to do
        status, _, err = penstock(*words)
        assert (status, "2 of 5" in err, "prompt 2" in err, "Traceback" in err) == (1, True, True, False)
        read = csv.DictReader(io.StringIO(output.read_text())) if kind == "csv" else None
        rows = list(read) if read is not None else [json.loads(line) for line in output.read_text().splitlines()]
        assert [row["prompt"] for row in rows] == asked
        assert [row["text"] for row in rows] == [wanted[0], "", wanted[1], "", wanted[2]]
        assert "64" in rows[1]["finish_reason"]
        assert "at least one" in rows[3]["finish_reason"]
        told = json.loads(said.read_text())
        assert [each["prompt"] for each in told["unanswered"]] == [2, 4]
        assert told["num_tokens"] == (27 if first else 0)


def test_prompts_on_the_command_line_that_cannot_be_answered(penstock: Run, folder: Path) -> None:
    words = ("-p", " ".join(["w5"] * 70), "-p", PROMPTS[1], "--max-new-tokens", 5, "--max-length", 64)
    status, out, err = penstock("generate", f"hf:{folder}", *words)
    assert (status, "1 of 2" in err) == (1, True)
    assert out.splitlines() == [PROMPTS[1] + answers(folder, PROMPTS[1:2], 5)[0]]


def test_weights_in_16_bits(penstock: Run, folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    words = ("generate", f"hf:{folder}", "-p", PROMPTS[0], "-o", output, "--max-new-tokens", 5)
    assert penstock(*words, "--runtime", "eager:bfloat16")[0] == 0
    assert json.loads(output.read_text())["num_tokens"] == 5
    status, _, err = penstock(*words)  # in float32 the rows may be others
    assert (status, "runtime" in err) == (2, True)
    status, _, err = penstock("generate", f"hf:{folder}", "-p", "w9", "--runtime", "onnxruntime:int3")
    assert (status, "int3" in err) == (2, True)


def test_prompts_on_the_command_line(penstock: Run, folder: Path) -> None:
    status, out, _ = penstock("generate", f"hf:{folder}", "-p", PROMPTS[0], "-p", PROMPTS[1], "--max-new-tokens", 5)
    assert status == 0
    wanted = answers(folder, PROMPTS[:2], 5)
    assert out.splitlines() == [prompt + answer for prompt, answer in zip(PROMPTS[:2], wanted, strict=True)]


def test_an_encoders_prompts_are_not_continued(penstock: Run, encoding: Path) -> None:
    asked = ("-p", PROMPTS[0], "-p", PROMPTS[2], "--max-new-tokens", 9, "--max-length", 64)
    status, out, err = penstock("generate", f"hf:{encoding}", *asked)
    assert (status, "4 beams" in err) == (0, True)
    assert out.splitlines() == answers(encoding, [PROMPTS[0], PROMPTS[2]], 9, transformers.AutoModelForSeq2SeqLM)


def test_seeded_choice_repeats(penstock: Run, folder: Path) -> None:
    words = ("generate", f"hf:{folder}", "-p", PROMPTS[0], "--temperature", 1.5, "--max-new-tokens", 20)
    first, again, other = (penstock(*words, "--set", f"seed={seed}")[1] for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_conversation(penstock: Run, folder: Path) -> None:
    options = ["--max-new-tokens", 6, "--max-length", 64]
    status, out, _ = penstock("chat", f"hf:{folder}", *options, typed="w5 w6\nw7\n\n")
    assert status == 0
    first = answers(folder, ["user w5 w6"], 6)[0].strip()
    second = answers(folder, [f"user w5 w6 assistant {first} user w7"], 6)[0].strip()
    assert out.splitlines() == [first, second]


def test_too_long_conversation_is_one_line(penstock: Run, folder: Path) -> None:
    typed = " ".join(["w5"] * 70) + "\nw7\n\n"
    status, out, err = penstock("chat", f"hf:{folder}", "--max-new-tokens", 6, "--max-length", 64, typed=typed)
    assert status == 0
    assert "64" in err
    assert out.splitlines() == [answer.strip() for answer in answers(folder, ["user w7"], 6)]


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ([], "--prompt"),
        (["-p", "w3", "--file", "x"], "--file"),
        (["--file", "missing.txt"], "missing.txt"),
        (["-p", "w3", "--set", "top_p=0.5"], "--temperature"),
        (["-p", "w3", "--max-new-tokens", "600"], "512"),
        (["-p", ""], "at least one"),
    ],
)
def test_wrong_use_is_one_line(penstock: Run, folder: Path, words: list[str], value: str) -> None:
    status, _, err = penstock("generate", f"hf:{folder}", *words)
    assert status in {1, 2}
    assert value in err
    assert "Traceback" not in err


def test_a_model_without_a_tokenizer_or_a_template(penstock: Run, folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    decoder("llama").save_pretrained(bare)
    status, _, err = penstock("generate", f"hf:{bare}", "-p", "w3")
    assert (status, "tokenizer" in err) == (2, True)
    status, _, err = penstock("generate", "timm:resnet18", "-p", "w3")
    assert (status, "hf:" in err) == (2, True)
    plain = tmp_path / "plain"
    plain.mkdir()
    for file in folder.iterdir():
        if "template" not in file.name:
            (plain / file.name).write_bytes(file.read_bytes())
    status, _, err = penstock("chat", f"hf:{plain}")
    assert (status, "template" in err) == (2, True)


def test_a_tokenizer_of_another_model(penstock: Run, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    decoder("llama").save_pretrained(other)
    settings = json.loads((other / "config.json").read_text())
    small = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings | {"vocab_size": 50}))
    small.save_pretrained(other)
    for file in folder.glob("tokenizer*"):
        (other / file.name).write_bytes(file.read_bytes())
    status, _, err = penstock("generate", f"hf:{other}", "-p", "w3")
    assert (status, "another model" in err) == (2, True)


def test_trained_language_model_writes_text(penstock: Run, tmp_path: Path) -> None:
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("to be or not to be, that is the question. " * 60)
    model = "hf:gpt2,vocab_size=300,n_embd=16,n_layer=2,n_head=2,n_positions=64,bos_token_id=0,eos_token_id=0"
    words = (
        "train", model, "--data", text, "--set", "length=16", "--batch-size", 8, "--epochs", 1, "--stages", 2, "-o",
        run,
    )  # fmt: skip
    assert penstock(*words)[0] == 0
    status, out, err = penstock("generate", f"hf:{run}", "-p", "to be", "--max-new-tokens", 5, "--max-length", 64)
    assert status == 0, err
    assert out.startswith("to be")
    assert out.strip() == "to be" + answers(run, ["to be"], 5)[0].rstrip()


def test_under_torchrun_all_processes_end_well(folder: Path) -> None:
    done = run_python(
        "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()), "-m",
        "penstock", "generate", f"hf:{folder}", "-p", PROMPTS[0], "--max-new-tokens", "5", deadline_s=120,
    )  # fmt: skip
    assert done.status == 0, done.stderr
    assert done.stdout.strip() == PROMPTS[0] + answers(folder, PROMPTS[:1], 5)[0]
    for wrong in ("error", "lost", "terminate"):
        assert wrong not in done.stderr
