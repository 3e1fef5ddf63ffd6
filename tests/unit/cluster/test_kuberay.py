"""The manifest for KubeRay: the operator's rules, what Ray reads, Ray Serve's schema, our declaration of a cluster."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from cospec.cluster.config import ClusterConfig

MANIFEST = Path("examples/cluster/kuberay.yaml")
# Field names of KubeRay's API reference, ray.io/v1. No Python package has the whole schema.
SPEC = {"serveConfigV2", "rayClusterConfig", "serveService", "upgradeStrategy", "excludeHeadPodFromServeSvc"}
CLUSTER = {
    "rayVersion", "authOptions", "enableInTreeAutoscaling", "autoscalerOptions", "gcsFaultToleranceOptions",
    "headGroupSpec", "workerGroupSpecs", "suspend", "managedBy", "headServiceAnnotations",
}  # fmt: skip
GROUP = {"rayStartParams", "template", "resources", "labels"}
HEAD = {*GROUP, "headService", "enableIngress", "ingressOptions", "serviceType"}
WORKER = {
    *GROUP, "groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "idleTimeoutSeconds", "priority",
    "scaleStrategy", "suspend",
}  # fmt: skip


def service() -> dict[str, Any]:
    (found,) = [each for each in yaml.safe_load_all(MANIFEST.read_text()) if each["kind"] == "RayService"]
    assert found["apiVersion"] == "ray.io/v1"
    spec: dict[str, Any] = found["spec"]
    return spec


def test_fields_are_those_of_the_custom_resource() -> None:
    spec = service()
    cluster = spec["rayClusterConfig"]
    assert spec.keys() <= SPEC
    assert cluster.keys() <= CLUSTER
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"].keys() <= HEAD
    for group in cluster["workerGroupSpecs"]:
        assert group.keys() <= WORKER
        assert {"groupName", "rayStartParams", "template"} <= group.keys()
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        (container,) = group["template"]["spec"]["containers"]
        assert {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"} in container["env"]


def test_operator_accepts_the_cluster() -> None:
    """The rules of ``ValidateRayClusterSpec`` in KubeRay that concern fields of the manifest."""
    cluster = service()["rayClusterConfig"]
    assert tuple(map(int, cluster["rayVersion"].split("."))) >= (2, 52, 0), "the first version with tokens"
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
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
