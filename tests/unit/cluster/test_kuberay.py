"""The manifest for KubeRay: fields of its custom resource, Ray Serve's own schema, and our declaration of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from cospec.cluster.config import ClusterConfig

MANIFEST = Path("examples/cluster/kuberay.yaml")
# Field names of KubeRay's API reference, ray.io/v1. The whole schema is not a package, so this test holds names alone.
SPEC = {"serveConfigV2", "rayClusterConfig", "serveService", "upgradeStrategy", "excludeHeadPodFromServeSvc"}
CLUSTER = {
    "rayVersion", "authOptions", "enableInTreeAutoscaling", "autoscalerOptions", "gcsFaultToleranceOptions",
    "headGroupSpec", "workerGroupSpecs", "suspend", "managedBy", "headServiceAnnotations",
}  # fmt: skip
HEAD = {"template", "headService", "enableIngress", "rayStartParams", "serviceType"}
WORKER = {
    "groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "idleTimeoutSeconds", "rayStartParams",
    "template", "scaleStrategy", "suspend",
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


def test_application_is_one_that_ray_serve_and_cospec_read() -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="the extra cluster is not installed")
    declared = schema.ServeDeploySchema.model_validate(yaml.safe_load(service()["serveConfigV2"]))
    (application,) = declared.applications
    assert application.import_path == "cospec.cluster.application:build_app"
    config = ClusterConfig.build(application.args)
    groups = {group["groupName"]: group for group in service()["rayClusterConfig"]["workerGroupSpecs"]}
    assert config.target.scale.max == groups["target"]["maxReplicas"]
    assert groups["target"]["rayStartParams"]["labels"] == "role=target"
    assert config.target.placement.labels == {"role": "target"}


def test_example_for_one_machine_can_be_placed() -> None:
    config = ClusterConfig.read(Path("examples/cluster/cluster.yaml"))
    assert config.machine.num_cpus is not None
    assert config.target.scale.max * config.target.placement.num_cpus <= config.machine.num_cpus
    assert config.target.placement.labels == config.machine.labels
