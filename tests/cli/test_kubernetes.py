"""``python -m ddpkit kubernetes``: the jobs that it writes, and what it refuses to write."""

from __future__ import annotations

import re

import pytest
import yaml

from ddpkit.cli import main
from ddpkit.cli.job_file import scalar
from ddpkit.cli.kubernetes import run
from ddpkit.errors import ConfigError

from .job_schemas import problems

USUAL = (
    "train.py",
    "hparams.yaml",
    "--image=team/speech:1",
    "--volume=speech-work",
    "--nodes=2",
    "--gpus-per-node=4",
)
V1 = (*USUAL, "--kind=pytorchjob")
SCHEMAS = {
    "TrainingRuntime": "training_runtime",
    "TrainJob": "train_job",
    "PyTorchJob": "pytorch_job",
}


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "hparams.yaml"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.fixture
def write(recipe, capsys):
    """Write the documents of a job, each of which its published schema takes, by their kinds."""

    def write(*words):
        assert main(["kubernetes", *words]) == 0
        text = capsys.readouterr().out
        documents = list(yaml.safe_load_all(text))
        for document in documents:
            assert problems(document, SCHEMAS[document["kind"]]) == []
        return {document["kind"]: document["spec"] for document in documents} | {"text": text}

    return write


def container_of(written):
    """Return what a pod runs, and the pod, of either kind."""
    if "PyTorchJob" in written:
        pod = written["PyTorchJob"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
        return pod["containers"][0], pod
    [job] = written["TrainingRuntime"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    return pod["containers"][0] | written["TrainJob"]["trainer"], pod


def environment(container):
    return {variable["name"]: variable["value"] for variable in container["env"]}


def test_a_train_job_with_its_runtime(write):
    written = write(*USUAL)
    assert written["TrainJob"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "TrainingRuntime",
        "name": "train",
    }
    trainer = written["TrainJob"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    assert trainer["command"] == ["torchrun", "train.py", "hparams.yaml"]
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 4}}
    assert environment(trainer) == {"OMP_NUM_THREADS": "1", "PET_SHUTDOWN_TIMEOUT": "270"}
    runtime = written["TrainingRuntime"]
    assert runtime["mlPolicy"] == {"torch": {}}
    spec = runtime["template"]["spec"]
    [job] = spec["replicatedJobs"]
    assert (spec["failurePolicy"], job["name"]) == ({"maxRestarts": 3}, "node")
    assert job["template"]["metadata"]["labels"] == {
        "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
    }
    assert job["template"]["spec"]["backoffLimit"] == 0
    container, pod = container_of(written)
    assert (container["name"], container["image"], container["workingDir"]) == (
        "node",
        "team/speech:1",
        "/work",
    )
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 300)


def test_a_pytorch_job_goes_on_with_the_nodes_that_are_there(write):
    written = write(*V1, "--min-nodes=1", "--max-restarts=5")
    spec = written["PyTorchJob"]
    assert spec["elasticPolicy"] == {
        "rdzvBackend": "c10d",
        "rdzvId": "train",
        "minReplicas": 1,
        "maxReplicas": 2,
        "maxRestarts": 5,
    }
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    assert (worker["replicas"], worker["restartPolicy"], spec["nprocPerNode"]) == (
        2,
        "OnFailure",
        "4",
    )
    container, _ = container_of(written)
    assert (container["name"], container["resources"]) == (
        "pytorch",
        {"limits": {"nvidia.com/gpu": 4}},
    )
    # where there is no Master, v1 does not pass the number of processes on
    assert container["command"] == ["torchrun", "--nproc-per-node=4", "train.py", "hparams.yaml"]
    assert environment(container)["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert "# Trains train.py on 1 to 2 node(s) x 4 process(es)" in written["text"]
    policy = write(*V1)["PyTorchJob"]["elasticPolicy"]
    assert (policy["minReplicas"], policy["maxReplicas"]) == (2, 2)


@pytest.mark.parametrize("usual", [USUAL, V1])
def test_every_option_is_in_the_file(usual, write):
    written = write(
        *usual[:-1] if usual is USUAL else (*USUAL[:-1], "--kind=pytorchjob"),
        "--gpus-per-node=8",
        "--gpu-resource=amd.com/gpu",
        "--nproc-per-node=16",
        "--cpus-per-node=64",
        "--memory-per-node=200Gi",
        "--grace=40",
        "--mount-path=/data",
        "--workdir=/app",
        "--job-name=speech-1",
        "--namespace=team",
        "--env=NCCL_DEBUG=INFO",
        "--env=WORDS=$HOME: a b",
    )
    container, pod = container_of(written)
    resources = container.get("resources") or container["resourcesPerNode"]
    assert resources["limits"] == {"amd.com/gpu": 8, "cpu": 64, "memory": "200Gi"}
    assert pod["terminationGracePeriodSeconds"] == 40
    assert {"name": "work", "mountPath": "/data"} in container["volumeMounts"]
    assert {"name": "work", "persistentVolumeClaim": {"claimName": "speech-work"}} in pod["volumes"]
    assert container["workingDir"] == "/app"
    found = environment(container)
    assert (found["NCCL_DEBUG"], found["PET_SHUTDOWN_TIMEOUT"]) == ("INFO", "20")
    # Kubernetes makes $$ into $
    assert found["WORDS"] == "$$HOME: a b"
    documents = list(yaml.safe_load_all(written["text"]))
    assert {document["metadata"]["name"] for document in documents} == {"speech-1"}
    assert {document["metadata"]["namespace"] for document in documents} == {"team"}


def test_nodes_without_gpus(write):
    words = (*USUAL[:-1], "--gpus-per-node=0", "--nproc-per-node=4", "--cpus-per-node=16")
    container, _ = container_of(write(*words))
    assert container["resourcesPerNode"] == {"limits": {"cpu": 16}}
    assert environment(container)["OMP_NUM_THREADS"] == "4"
    container, _ = container_of(write(*words[:-1], "--kind=pytorchjob"))
    assert "resources" not in container


WORDS = ["a b", "it's", '"', "$HOME", "$(PET_NNODES)", "$$", "\\", "*", "~", "é", "", "no", "1e3"]
WORDS += ["0x1f", "a: b", "- x", "#c", "a #b", "x:", "a\nb", "null", "[1", "{a: 1}", "!x", "&x"]
WORDS += ["a\rb", "a\tb'\\\\", "a\x85b", "\u2028", "\x07"]


def as_kubernetes_reads(word):
    """Do what Kubernetes does with a word of a command, where no variable of its name is set."""
    return re.sub(r"\$(\$|\(\w+\))", lambda found: "$" if found[1] == "$" else found[0], word)


@pytest.mark.parametrize("usual", [USUAL, V1])
def test_what_goes_to_the_recipe_arrives_as_it_was(usual, write):
    container, _ = container_of(write(*usual, "--", *WORDS))
    got = container["command"][-len(WORDS) :]
    assert [as_kubernetes_reads(word) for word in got] == WORDS
    assert all(isinstance(word, str) for word in got)


@pytest.mark.parametrize(
    "word",
    [*WORDS, "0b1", "1_0", "12:30:45", "2001-01-01", "on", "Y", ".5", "0o17", "-1", ".", "..", "-"],
)
def test_a_word_is_a_word_for_both_versions_of_yaml(word):
    from ruamel.yaml import YAML

    assert yaml.safe_load(scalar(word)) == word
    assert YAML(typ="safe", pure=True).load(scalar(word)) == word


def test_the_schemas_find_what_is_wrong(write):
    documents = list(yaml.safe_load_all(write(*USUAL)["text"]))
    trainer = documents[1]["spec"]["trainer"]
    trainer |= {"numNode": 2, "numNodes": "2", "env": [{"value": "1"}]}
    assert sorted(problems(documents[1], "train_job")) == [
        "train_job.spec.trainer.env[0]: name is missing",
        "train_job.spec.trainer.numNodes: '2' is no integer",
        "train_job.spec.trainer: numNode is unknown",
    ]


def test_a_name_from_the_recipe(recipe, write):
    (recipe / "2nd Try_ASR.py").touch()
    written = write("2nd Try_ASR.py", *USUAL[1:])
    assert written["TrainJob"]["runtimeRef"]["name"] == "nd-try-asr"
    assert written["TrainJob"]["trainer"]["command"][1] == "2nd Try_ASR.py"


@pytest.mark.parametrize("kind", ["trainjob", "pytorchjob"])
def test_a_name_that_yaml_takes_for_something_else_is_a_name(write, kind):
    written = write(*USUAL, "--job-name=null", "--kind", kind)
    documents = yaml.safe_load_all(written["text"])
    assert {document["metadata"]["name"] for document in documents} == {"null"}


def test_a_recipe_of_the_image_is_given_by_an_absolute_path(recipe, write):
    container, _ = container_of(write("/app/train.py", *USUAL[2:]))
    assert container["command"] == ["torchrun", "/app/train.py"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tran.py", *USUAL[2:]), "there is no file 'tran.py'"),
        ((*USUAL[:-1], "--gpus-per-node=0"), "how many processes on a node?"),
        ((*USUAL, "--min-nodes=1"), "a TrainJob has always as many nodes"),
        ((*V1, "--min-nodes=3"), "--min-nodes=3 is more than --nodes=2"),
        ((*USUAL, "--mount-path=work"), "--mount-path='work' is a path in the container"),
        ((*USUAL, "--workdir=app"), "--workdir='app' is a path in the container"),
        ((*USUAL, "--volume="), "--volume='' is empty"),
        ((*USUAL, "--image= "), "--image=' ' is empty"),
        ((*USUAL, "--job-name=Speech"), "--job-name='Speech' must have lower-case letters"),
        ((*USUAL, f"--job-name={'a' * 41}"), "and have 40 at most"),
        ((*USUAL, "--env=NCCL_DEBUG"), "is no variable. Give --env NAME=VALUE"),
        ((*USUAL, "--env=PET_NNODES=4"), "PET_NNODES is set by the controller"),
        ((*USUAL, "--", "--lr=1", "--nproc=4"), "--nproc=4, after --: torchrun starts the process"),
        ((*USUAL, "--", "--nproc", "gpu"), "--nproc, after --: torchrun starts the processes"),
    ],
)
def test_what_cannot_work_is_refused(recipe, words, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        run(words)
