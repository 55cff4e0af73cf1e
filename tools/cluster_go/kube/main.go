// Program kube bundles etcd, the Kubernetes control plane, the kubelet, kube-proxy and kubectl into one
// executable, so that the packages they share are linked, stored and paged in once.
//
// The first argument selects the program: `kube kubelet --config=...`.
package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	_ "time/tzdata" // CronJob time zones, without relying on the host's zone files

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	_ "k8s.io/client-go/plugin/pkg/client/auth"
	"k8s.io/component-base/cli"
	"k8s.io/component-base/logs"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	kubectlutil "k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// serve runs a component built on cobra; the command is built only when chosen, because building one registers
// flags and metrics globally.
func serve(build func() *cobra.Command) func() {
	return func() { os.Exit(cli.Run(build())) }
}

func runKubectl() {
	logs.GlogSetter(kubectl.GetLogVerbosity(os.Args))
	if err := cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()); err != nil {
		kubectlutil.CheckErr(err)
	}
}

func main() {
	programs := map[string]func(){
		"etcd":                    func() { etcdmain.Main(os.Args) },
		"kubectl":                 runKubectl,
		"kubelet":                 serve(func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) }),
		"kube-apiserver":          serve(apiserver.NewAPIServerCommand),
		"kube-controller-manager": serve(controllermanager.NewControllerManagerCommand),
		"kube-proxy":              serve(proxy.NewProxyCommand),
		"kube-scheduler":          serve(func() *cobra.Command { return scheduler.NewSchedulerCommand() }),
	}
	names := make([]string, 0, len(programs))
	for name := range programs {
		names = append(names, name)
	}
	slices.Sort(names)
	usage := "usage: kube {" + strings.Join(names, "|") + "} [flags]"

	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, usage)
		os.Exit(2)
	}
	run, known := programs[os.Args[1]]
	if !known {
		fmt.Fprintf(os.Stderr, "kube: no program named %q\n%s\n", os.Args[1], usage)
		os.Exit(2)
	}
	os.Args = os.Args[1:]
	run()
}
