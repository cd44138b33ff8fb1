"""Launch scripts: their arguments are those that bash passes on, and nothing of them runs."""

import subprocess
from pathlib import Path

import pytest

from megatron_fanformer.errors import InputError
from megatron_fanformer.formats.launch_scripts import read_arguments
from megatron_fanformer.formats.shell_words import Word


def texts(source: str) -> list[str]:
    return [word.text for word in read_arguments(source).words]


SCRIPT = r"""#!/bin/bash
# A comment with 'half a quote
export CUDA_DEVICE_MAX_CONNECTIONS=1 PREFIX="a b"
NAME=run; LAYERS=4 # and a comment
SAVE=${SAVE_UNSET:-"checkpoints/${NAME}_x"}
TITLE="${TITLE_UNSET:-'a' "${NAME}'s" '$LAYERS}' title}"
MODEL_ARGS=(
    --num-layers $LAYERS   # deep
    # --hidden-size 1
    --hidden-size 64 --title "two words" --long "$TITLE" --quoted '$LAYERS'
)
MODEL_ARGS+=(--swiglu "--split 9,1")
OLD=" --lr 1e-4 \
   --bf16 "
OLD+="--seed 3"
LAYERS=5
PROGRAM="scripts/pretrain_gpt.py"
if [ -f "$PROGRAM" ]; then echo "there is pretrain_gpt.py here"; fi
mkdir -p "$SAVE" && echo "made $SAVE" > /dev/null
TORCH=(echo --nnodes 1)
FOO=bar ${TORCH[@]} \
    "$PROGRAM" \
    ${MODEL_ARGS[@]} $OLD --save=$SAVE --one "$PREFIX" --two $PREFIX "${MODEL_ARGS[@]}" --x a\ b ${EMPTY:-} \
    --dollar \$1 --last "${NAME}"/x 2>&1 | cat
set +x
"""


def test_a_script_gives_the_arguments_that_bash_does(tmp_path: Path) -> None:
    (script := tmp_path / "run.sh").write_text(SCRIPT.replace("cat\n", "tr '\\n' '\\n'\n"))
    words = read_arguments(str(script)).words
    assert not any(word.unresolved for word in words)
    (script := tmp_path / "launch.sh").write_text(SCRIPT.replace("(echo --nnodes 1)", "(printf '%s\\n')"))
    bash = subprocess.run(["bash", script], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert ["scripts/pretrain_gpt.py", *(word.text for word in words)] == bash.splitlines()


CONDITIONAL = """
if [ -z "$SEQ" ]; then SEQ=4096; fi
[ -n "$X" ] && WIDTH=8
HERE=$(pwd)
CORES=$((2 * 4))
for i in 1 2; do LIST+=(--a); done
change() {
    RATE=3
}
RATE=1
RATE=2
torchrun pretrain_gpt.py --seq-length $SEQ --hidden-size $WIDTH --save $HERE/x --n ${CORES} --load $1 "${LIST[@]}" \\
    --lr $RATE --data-path ${OTHER%.bin} `echo y`
"""


def test_what_only_a_shell_could_tell_is_named(tmp_path: Path) -> None:
    (script := tmp_path / "run.sh").write_text(CONDITIONAL)
    unresolved = [word for word in read_arguments(str(script)).words if word.unresolved]
    assert unresolved == [
        Word("$SEQ", ("$SEQ",)),
        Word("$WIDTH", ("$WIDTH",)),
        Word("$(pwd)/x", ("$(pwd)",)),
        Word("$((2 * 4))", ("$((2 * 4))",)),
        Word("$1", ("$1",)),
        Word("${LIST[@]}", ("${LIST[@]}",)),
        Word("${OTHER%.bin}", ("${OTHER%.bin}",)),
        Word("`echo y`", ("`echo y`",)),
    ]
    assert not list(tmp_path.glob("x*"))


DOCUMENT = """cat > config.json <<'EOF' <<< "not here"
{
  "optimizer": {
    "type": "Adam"
  }
}
EOF
cat <<-END
\tdon't
}
\tEND
"""
BEFORE = [
    "(cd . && :) | cat; f() (:)\n",
    "case x in x) :;; (y | z) :;; esac > >(cat) < <(:)\n",
    "[[ x =~ ^(x|y)$ && ( x == x ) ]]; X=(a b) Y=$( (:) ); : &> log\n",
    "function usage {\n    echo usage\n}\n",
    "function usage() { echo usage; }\n",
    "if { true; }; then\n    if true; then { :; } fi fi\n",
    DOCUMENT,
]
SET_BY_A_CONDITION = "LAYERS=4\nif [ -n x ]; then\n    LAYERS=8\nfi\n"


@pytest.mark.parametrize("before", ["", *BEFORE])
@pytest.mark.parametrize(
    "setting",
    [
        SET_BY_A_CONDITION,
        "LAYERS=4\nfor LAYERS in 8 16; do :; done\n",
        "LAYERS=4\nselect LAYERS in 8 16; do break; done\n",
        "LAYERS=4\nfunction setup {\n    LAYERS=16\n}\n",
        "LAYERS=4\nfunction setup { LAYERS=16; }\n",
        "LAYERS=4\nfunction setup()\n{\n    LAYERS=16\n}\n",
    ],
)
def test_what_a_body_or_a_loop_sets_is_not_resolved(before: str, setting: str, tmp_path: Path) -> None:
    (script := tmp_path / "run.sh").write_text(f"{before}{setting}pretrain_gpt.py --num-layers $LAYERS\n")
    assert read_arguments(str(script)).words == [Word("--num-layers"), Word("$LAYERS", ("$LAYERS",))]


@pytest.mark.parametrize(
    "setting",
    [
        "[ -n x ] &&\n    LAYERS=8\n",
        "[ -z x ] || # a comment\n\n  # and another\n    LAYERS=8\n",
        "cat <<END &&\nLAYERS=5\nEND\nLAYERS=8\n",
    ],
)
def test_a_condition_holds_past_the_end_of_its_line(setting: str, tmp_path: Path) -> None:
    script = f"LAYERS=4\n{setting}SEED=3\npretrain_gpt.py --seed $SEED --num-layers $LAYERS"
    assert bash_says(script, tmp_path) == "--seed 3 --num-layers 8"
    (file := tmp_path / "run.sh").write_text(script)
    assert texts(str(file)) == ["--seed", "3", "--num-layers", "$LAYERS"]


@pytest.mark.parametrize(
    "setting",
    [
        "( A=8; B=8 )",
        "(true) && (A=8)",
        "echo | A=8",
        "echo |&\n A=8",
        "A=8 | cat",
        "A=8 & wait",
        "unset A | cat",
        "( case x in x) A=8;; (y | z) ;; esac; A=9 )",
        "case x in x) ( A=8 ) ;; y) esac",
        "((echo; A=8) | cat)",
    ],
)
def test_what_a_process_of_its_own_sets_is_not_taken(setting: str, tmp_path: Path) -> None:
    script = f"A=4\n{setting} > log\nB=5\npretrain_gpt.py --b $B --a $A"
    assert bash_says(script, tmp_path) == "--b 5 --a 4"
    assert texts(script) == ["--b", "5", "--a", "$A"]


def test_a_function_in_a_subshell_sets_nothing_for_sure(tmp_path: Path) -> None:
    script = "A=4\nf() (\n  A=8; pretrain_gpt.py --b $B --a $A\n)\ng() ( A=9 )\nB=5 f"
    assert bash_says(script, tmp_path) == "--b 5 --a 8"
    assert texts(script) == ["--b", "$B", "--a", "$A"]


@pytest.mark.parametrize("before", BEFORE)
def test_what_comes_after_a_body_is_plain(before: str, tmp_path: Path) -> None:
    (script := tmp_path / "run.sh").write_text(f"{before}LAYERS=4\npretrain_gpt.py --num-layers $LAYERS\n")
    bash = subprocess.run(
        ["bash", "-c", script.read_text().replace("pretrain_gpt.py", "echo >&2")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert " ".join(texts(str(script))) == bash.stderr.strip() == "--num-layers 4"


def bash_says(script: str, folder: Path) -> str:
    """The arguments that bash passes on."""
    script = script.replace("pretrain_gpt.py", "echo >&2")
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, check=True)
    return done.stderr.strip()


@pytest.mark.parametrize(
    "command",
    [
        "read -r A <<< 8",
        "read -p 'layers? ' -t 1 X A <<< '1 8'",
        "mapfile -t A <<< 8",
        "readarray A <<< 8",
        "getopts 8 A -8 || A=8",
        "let A=A*2",
        "let 'A += 4'",
        "let ++A",
        "((A=8))",
        "(( A *= 2 ))",
        "if ((A++ == 4)); then :; fi",
        "for ((A = 0; A < 8; A++)); do :; done",
        "true && ((A++, A <<= 1))",
        ": $((A += 4))",
        ": $((B[1] = A++))",
        "printf -v A '%d' 8",
        "printf -vA 8",
        "A[0]=8",
        "A[0]+=8",
        "declare A[0]=8",
        "declare -i A=A*2",
        "declare -ix A; A+=4",
        "declare -i A; A=010",
        "unset A",
        "unset -v X A",
        "unset A[0]",
        "[ 1 ] && unset A",
    ],
)
def test_what_a_command_sets_is_not_what_was_assigned(command: str, tmp_path: Path) -> None:
    script = f"A=4\n{command}\nB=5\npretrain_gpt.py --a $A --b $B"
    said = bash_says(script, tmp_path).split()
    assert said[-2:] == ["--b", "5"] and said[1] != "4"
    (file := tmp_path / "run.sh").write_text(script)
    assert read_arguments(str(file)).words == [Word("--a"), Word("$A", ("$A",)), Word("--b"), Word("5")]


@pytest.mark.parametrize(
    "command",
    [
        "((A == 8 || A >= 3 && A != 5))",
        "(( X = A <= 4 ? 1 : 2 ))",
        "echo $((A * 2)) $(( (A + 1) - -A ))",
        "let X=A+1",
        "printf '%s' -v A",
        "echo read A unset A",
        "unset -f A",
        "X[A]=8",
        "declare -rx X=8",
        "declare -i X=8",
        "unset X; A=${A:-8}",
        "((echo x) | cat)",
    ],
)
def test_what_a_command_leaves_is_known(command: str, tmp_path: Path) -> None:
    script = f"A=4\n{command} > log\npretrain_gpt.py --a $A"
    (file := tmp_path / "run.sh").write_text(script)
    assert " ".join(texts(str(file))) == bash_says(script, tmp_path) == "--a 4"


def test_an_unset_variable_has_its_default_again(tmp_path: Path) -> None:
    (file := tmp_path / "run.sh").write_text(script := "A=4\nunset A\npretrain_gpt.py --a ${A:-8}")
    assert " ".join(texts(str(file))) == bash_says(script, tmp_path) == "--a 8"


@pytest.mark.parametrize(
    ("commands", "included"),
    [
        ("source env.sh\nA=4", ()),  # nothing is known before it
        ("source env.sh\nA=${A:-4}", ("source env.sh",)),  # which may have set it
        ("source env.sh\nA=${1:-4}", ()),
        ("source env.sh\nB=4\nA=${B:-3}", ()),
        ("B=${B:-4}\nsource x\nunset B\nA=${B:-4}; source y", ("source x", "source y")),
        ("source x\nA=${B:-${C:-4}}\ncat <<END\n. z; pretrain_gpt.py --a ${D:-4}\nEND", ("source x",)),
        ("A=4\nsource env.sh", ("source env.sh",)),
        ("A=4\n[ -f env.sh ] && . ./env.sh $A", (". ./env.sh 4",)),
        ('A=4\nif true; then eval "$(conda shell.bash hook)"; fi', ("eval $(conda shell.bash hook)",)),
        ("A=4\neval 'B=5'; source x; source x", ("eval B=5", "source x")),
    ],
)
def test_files_that_are_not_read_are_named(commands: str, included: tuple[str, ...], tmp_path: Path) -> None:
    """Most set up an environment: values stay, and whoever wrote the script is told."""
    (file := tmp_path / "run.sh").write_text(f"{commands}\npretrain_gpt.py --a $A\n")
    assert read_arguments(str(file)) == ([Word("--a"), Word("4")], included)


@pytest.mark.parametrize(
    "start",
    ["sbatch <<END\n. env.sh\npretrain_gpt.py --a ${A:-4}\nEND", "sh -c '. env.sh; pretrain_gpt.py --a ${A:-4}'"],
)
def test_another_shells_files_are_named(start: str) -> None:
    assert read_arguments(start) == ([Word("--a"), Word("4")], (". env.sh",))


def test_a_start_by_eval_is_none_of_them() -> None:
    for start in ('eval "torchrun pretrain_gpt.py --a $A"', "eval torchrun pretrain_gpt.py --a $A", "eval $RUN"):
        source = f"A=4\nRUN='torchrun pretrain_gpt.py --a 4'\n{start}"
        assert read_arguments(source) == ([Word("--a"), Word("4")], ())


@pytest.mark.parametrize(
    "command",
    [
        "N=$(tr -d ')' < /dev/null)",
        'N=$(echo "a)" "$(echo "b)" c)")',
        "N=$(echo \\) \\\\)",
        "N=$(echo x # a comment) that isn't read\n)",
        "N=$(cat <<END | tr -d ')'\ndon't :)\nEND\n)",
        "N=$(cat <<-'END' <<< x\n:( don't\n\tEND\n)",
        "N=$((1 << A)) M=$((2#11))",
        'N=${N:-"}"}; N=${M:-\\}}',
        """N="${N:-'}' "b's"}\"""",
        "(echo ')' '(' \"(\" > /dev/null)",
        "N=${N:-{x}; M=4",
    ],
)
def test_what_is_in_quotes_closes_nothing(command: str, tmp_path: Path) -> None:
    script = f"A=4\n{command}\npretrain_gpt.py --a $A"
    (file := tmp_path / "run.sh").write_text(script)
    assert " ".join(texts(str(file))) == bash_says(script, tmp_path) == "--a 4"


@pytest.mark.parametrize("text", ["a" * 500_000, "a[" * 250_000, "a " * 250_000, "- " * 250_000 + "a"])
def test_arithmetic_is_read_in_one_pass(text: str) -> None:
    assert texts(f"(({text}))\npretrain_gpt.py --a 4") == ["--a", "4"]


def test_a_scripts_path_may_hold_blanks(tmp_path: Path) -> None:
    (script := tmp_path / "my run.sh").write_text("pretrain_gpt.py --a 4")
    assert texts(str(script)) == ["--a", "4"]
    assert texts(f"pretrain_gpt.py --a {'4' * 5000}") == ["--a", "4" * 5000]  # longer than a path may be


def test_a_here_document_starts_it_where_nothing_else_does() -> None:
    job = "LAYERS=4\nsbatch <<EOF\nsrun pretrain_gpt.py --num-layers $LAYERS\nEOF\nLAYERS=5\n"
    assert texts(job) == ["--num-layers", "4"]
    assert texts(f"{job}pretrain_gpt.py --num-layers 6") == ["--num-layers", "6"]


def test_what_a_skipped_here_document_sets_is_not_the_scripts(tmp_path: Path) -> None:
    script = "A=4\ncat > job.sh <<END\nA=8\nB=8\npretrain_gpt.py --a 8\nEND\npretrain_gpt.py --a $A --b ${B:-4}"
    assert " ".join(texts(script)) == bash_says(script, tmp_path) == "--a 4 --b 4"


@pytest.mark.parametrize(
    "source",
    [
        "--num-layers 4 --title 'a b'",
        "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --title 'a b'",
        "python -u /opt/megatron/pretrain_mamba.py --num-layers 4 \\\n --title 'a b' > log",
        "srun -l bash -c \"torchrun pretrain_gpt.py --num-layers 4 --title 'a b'\"",
        "A='pretrain_gpt.py --num-layers 4'\nsrun sh -c \"torchrun $A --title 'a b'\"",
        "for i in 1; do\npretrain_gpt.py --num-layers 4 --title 'a b' &\ndone",
    ],
)
def test_a_command_line_may_begin_anywhere(source: str) -> None:
    assert texts(source) == ["--num-layers", "4", "--title", "a b"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("none.sh", "none.sh cannot be read (No such file or directory)"),
        ("", "starts no pretrain_"),
        ("torchrun train.py --num-layers 4", "starts no pretrain_"),
        ("pretrain_gpt.py --a 1\npretrain_gpt.py --a 2", "more than once"),
        ("--pipeline-model-parallel-layout Et|tL", "goes on with 'tL' after a separator; quote"),
        ("--a 'b", "has a ' that nothing closes"),
        ('--a "b', 'has a " that nothing closes'),
        ("--a ${b", "has a { that nothing closes"),
        ("--a $(b", "has a ( that nothing closes"),
        ("cat <<EOF\npretrain_gpt.py --a 1\n EOF\n", "has a << that nothing closes"),
        ("A=aaaaaaaaaa\n" + "A=$A$A$A$A\n" * 20 + "pretrain_gpt.py $A", "expand to more than"),
        ("--a " + "${x:-" * 40 + "}" * 40, "nests defaults"),
    ],
)
def test_what_holds_no_arguments_is_refused(source: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        read_arguments(source)
    assert message in str(refused.value) and len(str(refused.value).splitlines()) == 1
