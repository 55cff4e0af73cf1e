"""Kueue's manager as a process next to a control plane: its definitions, its webhooks at a loopback address, its
configuration."""

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from tools.cluster.control_plane import LOOPBACK, ControlPlane, free_ports

Document = dict[str, Any]
OWN_GROUP = "kueue.x-k8s.io"
NAMESPACE = "kueue-system"
METRICS_CERTIFICATES = "/etc/kueue/metrics/certs"
"""Where the manager looks for a certificate when it makes none itself; it cannot be told another place."""


def start_kueue(plane: ControlPlane, manager: Path, manifests: Path) -> None:
    """Start `manager` with the definitions and webhooks of `manifests`, the directory config/components of its source.

    It ends with the control plane.
    """
    folder = plane.run.path / "kueue"
    folder.mkdir()
    webhook_port, health_port = free_ports(LOOPBACK, 2)
    plane.kubectl("create", "namespace", NAMESPACE)
    plane.kubectl("apply", "--server-side", "-f", str(manifests / "crd" / "bases"))
    plane.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    certificates = folder / "certificates"
    certificates.mkdir()
    pair = plane.authority.sign("kueue", "/CN=kueue", "serverAuth", [f"IP:{LOOPBACK}"])
    shutil.copy(pair.certificate, certificates / "tls.crt")
    shutil.copy(pair.key, certificates / "tls.key")
    configuration = folder / "configuration.json"
    configuration.write_text(json.dumps(_configuration(webhook_port, health_port, certificates)))
    overlay = _overlay(folder, certificates)
    # Of /etc it sees a copy of its own, with the certificates in it.
    script = f'mount -t overlay overlay -o {overlay} /etc && exec "$0" "$@"'
    plane.start(
        "kueue",
        *("unshare", "--mount", "sh", "-c", script),
        *(manager, f"--config={configuration}", f"--kubeconfig={plane.kubeconfig}", "--zap-log-level=2"),
    )
    plane.wait_until(lambda: "Starting workers" in (plane.run.logs / "kueue.log").read_text(errors="replace"), "Kueue to start")
    authority = base64.b64encode(plane.authority.certificate.read_bytes()).decode()
    for document in yaml.safe_load_all((manifests / "webhook" / "manifests.yaml").read_text()):
        body = _at_loopback(document, webhook_port, authority)
        plane.kubectl("apply", "--server-side", "-f", "-", input=json.dumps(body))


def _configuration(webhook_port: int, health_port: int, certificates: Path) -> Document:
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": NAMESPACE,
        "health": {"healthProbeBindAddress": f"{LOOPBACK}:{health_port}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": LOOPBACK, "port": webhook_port, "certDir": str(certificates)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "integrations": {"frameworks": ["batch/job"]},
        # Visibility would be an API server of its own, behind an APIService.
        "featureGates": {"VisibilityOnDemand": False},
    }


def _overlay(folder: Path, certificates: Path) -> str:
    upper, work = folder / "etc", folder / "work"
    work.mkdir()
    shutil.copytree(certificates, upper / Path(METRICS_CERTIFICATES).relative_to("/etc"))
    return f"lowerdir=/etc,upperdir={upper},workdir={work}"


def _at_loopback(document: Document, port: int, authority: str) -> Document:
    """A webhook configuration that names no Service, and only what is served here: Jobs and Kueue's own kinds."""
    kept = []
    for webhook in document["webhooks"]:
        groups = {group for rule in webhook["rules"] for group in rule["apiGroups"]}
        if not groups <= {"batch", OWN_GROUP}:
            continue
        path = webhook["clientConfig"]["service"]["path"]
        webhook["clientConfig"] = {"url": f"https://{LOOPBACK}:{port}{path}", "caBundle": authority}
        kept.append(webhook)
    return {**document, "webhooks": kept}
