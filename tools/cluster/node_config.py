"""The configuration files of a node's programs, from the values that differ between machines and runs."""

from pathlib import Path
from typing import Any

from tools.cluster.certificates import KeyPair
from tools.cluster.network import BRIDGE_ADDRESS


def containerd_config(*, sandbox_image: str, plugins: Path, registries: Path, for_kubelet: bool) -> str:
    """Return containerd's configuration in TOML.

    Args:
        sandbox_image: image of the process that holds a pod's namespaces.
        plugins: directory of the network plugins' programs.
        registries: directory of `plain_http_registry`'s files, each as `host:port/hosts.toml`; read at each pull.
        for_kubelet: whether to serve the kubelet; if not, containerd only serves its store.
    """
    disabled = [] if for_kubelet else ["io.containerd.grpc.v1.cri"]
    # restrict_oom_score_adj: in a container, even root may not lower the score below its own.
    return f"""version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = {disabled}

[grpc]
  address = "/run/containerd/containerd.sock"

[plugins."io.containerd.grpc.v1.cri"]
  restrict_oom_score_adj = true
  sandbox_image = "{sandbox_image}"

  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"

    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"

      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false

  [plugins."io.containerd.grpc.v1.cri".registry]
    config_path = "{registries}"

  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "/etc/cni/net.d"
"""


def plain_http_registry(host: str) -> str:
    """Return containerd's configuration for a registry (`host:port`) without TLS."""
    return f'server = "http://{host}"\n[host."http://{host}"]\ncapabilities = ["pull", "resolve"]\n'


def network_plugins_config(pod_range: str) -> dict[str, Any]:
    """Return the list of network plugins that give a pod its address on the node's bridge."""
    addresses = {"type": "host-local", "ranges": [[{"subnet": pod_range}]], "routes": [{"dst": "0.0.0.0/0"}]}
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "hairpinMode": True, "ipMasq": False, "ipam": addresses}
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge, ports]}


def kubelet_config(*, address: str, cgroup: str, authority: Path, serving: KeyPair, resolver: Path) -> dict[str, Any]:
    """Return the KubeletConfiguration.

    Args:
        address: address of the node, on which the kubelet listens.
        cgroup: name of the top-level cgroup for the pods.
        authority: certificate that signs the clients' certificates.
        serving: certificate that the kubelet presents to its clients.
        resolver: resolv.conf of the node, for pods whose DNS policy uses it.
    """
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": address,
        "readOnlyPort": 0,
        "tlsCertFile": str(serving.certificate),
        "tlsPrivateKeyFile": str(serving.key),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(authority)},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroup}",
        # The test's control plane gives up a silent node within seconds, so a node must report its status often.
        "nodeStatusUpdateFrequency": "2s",
        "nodeLeaseDurationSeconds": 8,
        # A container that a test kills five times restarts within seconds, not after 10, 20, 40, 80 and 160 seconds.
        "crashLoopBackOff": {"maxContainerRestartPeriod": "2s"},
        "failCgroupV1": False,
        "failSwapOn": False,
        # The node has few cores and shares them with everything else here: limits would only leave cores idle.
        "cpuCFSQuota": False,
        "makeIPTablesUtilChains": False,
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "clusterDNS": [BRIDGE_ADDRESS],
        "clusterDomain": "cluster.local",
        "resolvConf": str(resolver),
        # Images cannot be pulled again, so none is deleted to free space. Pods are evicted only when nothing is left.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "nodefs.inodesFree": "1%",
            "imagefs.available": "1%",
        },
    }
