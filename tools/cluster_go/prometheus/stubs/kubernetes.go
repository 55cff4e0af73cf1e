// Package kubernetes takes the place of Prometheus' discovery of targets in a cluster, of which promtool names the settings only.
package kubernetes

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/config"

	"github.com/prometheus/prometheus/discovery"
)

// SDConfig is never read: it is not registered.
type SDConfig struct {
	HTTPClientConfig config.HTTPClientConfig
}

// Name is that of the settings.
func (*SDConfig) Name() string { return "kubernetes" }

// NewDiscoverer always fails.
func (*SDConfig) NewDiscoverer(discovery.DiscovererOptions) (discovery.Discoverer, error) {
	return nil, errors.New("built without the discovery of targets in a cluster")
}

// NewDiscovererMetrics has none.
func (*SDConfig) NewDiscovererMetrics(
	prometheus.Registerer, discovery.RefreshMetricsInstantiator,
) discovery.DiscovererMetrics {
	return nil
}
