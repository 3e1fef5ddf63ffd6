"""The manifest for KubeRay: schemas of its objects, the operator's rules, what Ray and Ray Serve read, our config."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import yaml

from cospec.cluster.config import ClusterConfig
from cospec.cluster.nodes.keys import make_keys
from cospec.cluster.nodes.wire import Welcome
from cospec.cluster.ray_cluster import ENVIRONMENT
from harness.nodes import Peer, hub_for_tests, on_nodes

MANIFEST = Path("examples/cluster/kuberay.yaml")
STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
INTEGER, BOOLEAN, STRING, OBJECT = ({"type": name} for name in ("integer", "boolean", "string", "object"))


def closed(required: tuple[str, ...] = (), /, **properties: Any) -> dict[str, Any]:
    """An object with these fields only, as a server refuses unknown fields under strict validation."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


# KubeRay's own fields in the custom resource definition rayservices.ray.io, version v1. Kubernetes' schema judges the
# pods and services inside.
HEAD = closed(
    ("template",), enableIngress=BOOLEAN, headService=OBJECT, ingressOptions=OBJECT, labels=STRINGS,
    rayStartParams=STRINGS, resources=STRINGS, serviceType=STRING, template=closed(metadata=OBJECT, spec=OBJECT),
)  # fmt: skip
WORKER = closed(
    ("groupName", "maxReplicas", "minReplicas", "template"), groupName=STRING, idleTimeoutSeconds=INTEGER,
    labels=STRINGS, maxReplicas=INTEGER, minReplicas=INTEGER, numOfHosts=INTEGER, priority=INTEGER,
    rayStartParams=STRINGS, replicas=INTEGER, resources=STRINGS, scaleStrategy=OBJECT, suspend=BOOLEAN,
    template=closed(metadata=OBJECT, spec=OBJECT), topology=OBJECT,
)  # fmt: skip
CLUSTER = closed(
    ("headGroupSpec",),
    authOptions=closed(enableK8sTokenAuth=BOOLEAN, mode={"enum": ["disabled", "token"]}, secretName=STRING),
    autoscalerOptions=closed(
        args={"type": "array"}, command={"type": "array"}, env={"type": "array"}, envFrom={"type": "array"},
        idleTimeoutSeconds=INTEGER, image=STRING, imagePullPolicy=STRING, resources=OBJECT, securityContext=OBJECT,
        upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]}, version={"enum": ["v1", "v2"]},
        volumeMounts={"type": "array"},
    ),
    enableInTreeAutoscaling=BOOLEAN, gcsFaultToleranceOptions=OBJECT, headGroupSpec=HEAD,
    headServiceAnnotations=STRINGS, managedBy=STRING, networkPolicy=OBJECT, rayVersion=STRING, suspend=BOOLEAN,
    tlsOptions=closed(enabled=BOOLEAN), upgradeStrategy=closed(type={"enum": ["Recreate", "None"]}),
    workerGroupSpecs={"type": "array", "items": WORKER},
)  # fmt: skip
SERVICE = closed(
    ("apiVersion", "kind", "metadata", "spec"), apiVersion={"const": "ray.io/v1"}, kind={"const": "RayService"},
    metadata=OBJECT,
    spec=closed(
        ("rayClusterConfig",), deploymentUnhealthySecondThreshold=INTEGER, excludeHeadPodFromServeSvc=BOOLEAN,
        managedBy=STRING, rayClusterConfig=CLUSTER, rayClusterDeletionDelaySeconds=INTEGER, serveConfigV2=STRING,
        serveService=OBJECT, serviceUnhealthySecondThreshold=INTEGER, suspend=BOOLEAN, upgradeStrategy=OBJECT,
    ),
)  # fmt: skip


def documents() -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in yaml.safe_load_all(MANIFEST.read_text())}


def service() -> dict[str, Any]:
    spec: dict[str, Any] = documents()["RayService"]["spec"]
    return spec


def groups_of(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def judge(found: dict[str, dict[str, Any]]) -> None:
    """Judge all objects as a Kubernetes server with KubeRay's definitions does.

    Raises:
        jsonschema.ValidationError: a field is unknown, missing or of another type.
    """
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    version = kubernetes_validate.latest_version()
    jsonschema.validate(found["RayService"], SERVICE)
    kubernetes_validate.validate(found["NetworkPolicy"], version, strict=True)
    for group in groups_of(found["RayService"]["spec"]["rayClusterConfig"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": group["template"].get("metadata", {})}
        kubernetes_validate.validate({**pod, "spec": group["template"]["spec"]}, version, strict=True)


def test_fields_are_those_of_the_custom_resource() -> None:
    judge(documents())
    cluster = service()["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for group in groups_of(cluster):
        (container,) = group["template"]["spec"]["containers"]
        settings = {each["name"]: each["value"] for each in container["env"]}
        assert settings.items() <= ENVIRONMENT.items(), "as in a cluster that cospec starts"
        assert {"RAY_USAGE_STATS_ENABLED", "RAY_worker_niceness"} <= settings.keys()


@pytest.mark.parametrize(
    "path",
    [
        ("RayService", "spec", "rayClusterConfig", "headGroupSpec"),
        ("RayService", "spec", "rayClusterConfig", "workerGroupSpecs", 0),
        ("RayService", "spec", "rayClusterConfig", "headGroupSpec", "template", "spec", "containers", 0),
        ("RayService", "spec", "rayClusterConfig", "workerGroupSpecs", 1, "template", "spec", "volumes", 0, "secret"),
        ("NetworkPolicy", "spec", "ingress", 0, "from", 0),
    ],
    ids=lambda path: str(path[-1]),
)
def test_an_unknown_field_is_refused(path: tuple[str | int, ...]) -> None:
    found = documents()
    place: Any = found
    for step in path:
        place = place[step]
    place["unknown"] = 1
    with pytest.raises(jsonschema.ValidationError, match="unknown"):
        judge(found)


def test_operator_accepts_the_cluster() -> None:
    """The rules of ``ValidateRayClusterSpec`` in KubeRay that concern fields of the manifest."""
    cluster = service()["rayClusterConfig"]
    assert tuple(map(int, cluster["rayVersion"].split("."))) >= (2, 52, 0), "the first version with tokens"
    for group in groups_of(cluster):
        given = group["rayStartParams"].keys()
        assert "labels" not in given, "the operator takes labels as a field of the group"
        assert not (group.get("resources") and given & {"num-cpus", "num-gpus", "memory", "resources"})
        assert group["template"]["spec"].get("restartPolicy", "Never") == "Never", "the autoscaler's rule"
        (container,) = group["template"]["spec"]["containers"]
        assert not {each["name"] for each in container["env"]} & {"RAY_REDIS_ADDRESS", "REDIS_USERNAME"}


def test_ray_finds_a_place_for_replicas() -> None:
    """Ray's autoscaler reads labels and processors of the groups."""
    ray = pytest.importorskip("ray.autoscaler._private.kuberay.autoscaling_config", reason="Ray is not installed")
    resource = {"metadata": {"name": "cospec", "namespace": "default"}, "spec": service()["rayClusterConfig"]}
    producer = ray.AutoscalingConfigProducer("cospec", "default")
    producer.kubernetes_api_client = SimpleNamespace(get=lambda path: resource)
    groups = producer()["available_node_types"]
    config = ClusterConfig.build(yaml.safe_load(service()["serveConfigV2"])["applications"][0]["args"])
    assert groups["target"]["labels"] == config.target.placement.labels
    assert groups["target"]["resources"]["CPU"] >= config.target.placement.num_cpus
    assert groups["headgroup"]["resources"]["CPU"] == 0
    (drafter,) = config.drafters
    assert groups["drafters"]["labels"] == drafter.placement.labels
    workers = {group["groupName"]: group for group in service()["rayClusterConfig"]["workerGroupSpecs"]}
    room = groups["drafters"]["resources"]["CPU"] // drafter.placement.num_cpus
    assert workers["drafters"]["minReplicas"] * room >= drafter.nodes


def mounted(group: dict[str, Any], keys: Path, folder: Path) -> Path:
    """The folder of drafter keys as the pods of a group see it."""
    (volume,) = group["template"]["spec"]["volumes"]
    sources = (
        [each["secret"] for each in volume["projected"]["sources"]] if "projected" in volume else [volume["secret"]]
    )
    for source in sources:
        for item in source.get("items", ()):
            (found,) = [path for path in keys.rglob(item["key"])]
            place = folder / item["path"]
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(found.read_bytes())
    return folder / "drafters"


def test_each_pod_has_the_keys_of_its_part(tmp_path: Path) -> None:
    """Replicas admit the drafter nodes, whose pods have no secret key of the verifier and no API keys."""
    pytest.importorskip("zmq")
    make_keys(tmp_path / "keys", ["cluster"])
    target, drafters = service()["rayClusterConfig"]["workerGroupSpecs"]
    hub = hub_for_tests(keys=mounted(target, tmp_path / "keys", tmp_path / "target"))
    drafter, _ = on_nodes(hub, "itself")
    own = mounted(drafters, tmp_path / "keys", tmp_path / "drafter")
    assert sorted(path.name for path in own.rglob("*.key*")) == ["cluster.key_secret", "verifier.key"]
    peer = Peer(hub.address, own)
    assert isinstance(peer.say(peer.hello()), Welcome)
    peer.close()
    drafter.close()
    assert "cospec-keys" not in str(drafters)


def test_the_api_server_runs_where_its_keys_are() -> None:
    config = ClusterConfig.build(yaml.safe_load(service()["serveConfigV2"])["applications"][0]["args"])
    assert config.target.placement.companion_options == {"num_cpus": 0, "label_selector": {"role": "target"}}


def test_application_is_one_that_ray_serve_and_cospec_read() -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="the extra cluster is not installed")
    declared = schema.ServeDeploySchema.model_validate(yaml.safe_load(service()["serveConfigV2"]))
    (application,) = declared.applications
    assert application.import_path == "cospec.cluster.application:build_app"
    config = ClusterConfig.build(application.args)
    groups = {group["groupName"]: group for group in service()["rayClusterConfig"]["workerGroupSpecs"]}
    assert config.target.scale.max == groups["target"]["maxReplicas"]
    assert config.target.placement.labels == groups["target"]["labels"]


def test_example_for_one_machine_can_be_placed() -> None:
    config = ClusterConfig.read(Path("examples/cluster/cluster.yaml"))
    assert config.machine.num_cpus is not None
    assert config.target.scale.max * config.target.placement.num_cpus <= config.machine.num_cpus
    assert config.target.placement.labels == config.machine.labels
