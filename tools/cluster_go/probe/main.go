// Program probe is the whole content of the test cluster's own image: the pod sandbox's process, and the small
// programs that tests of the cluster run in pods.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

const serviceAccount = "/var/run/secrets/kubernetes.io/serviceaccount/"

const usage = `usage: probe pause                    wait for SIGTERM, reaping orphaned children
       probe resolve NAME DURATION    print NAME's addresses as soon as it resolves; fail after DURATION
       probe api PATH                 print the status line and body of PATH on the API server, as the pod's account`

// pause holds a pod's namespaces open. It is process 1 of the sandbox, so it inherits and must reap orphans.
func pause() error {
	ended := make(chan os.Signal, 1)
	orphaned := make(chan os.Signal, 16)
	signal.Notify(ended, syscall.SIGINT, syscall.SIGTERM)
	signal.Notify(orphaned, syscall.SIGCHLD)
	for {
		select {
		case <-ended:
			return nil
		case <-orphaned:
			for {
				if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); err != nil || pid <= 0 {
					break
				}
			}
		}
	}
}

// resolve retries until the name exists, because DNS servers cache the answer "no such name" for a while.
func resolve(name string, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	for {
		addresses, err := net.DefaultResolver.LookupHost(ctx, name)
		if err == nil {
			fmt.Println(strings.Join(addresses, " "))
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s did not resolve within %s: %w", name, limit, err)
		case <-time.After(500 * time.Millisecond):
		}
	}
}

// callAPI goes the way of an in-cluster client: the kubernetes Service's ClusterIP and the projected token and CA.
func callAPI(path string) error {
	authority, err := os.ReadFile(serviceAccount + "ca.crt")
	if err != nil {
		return err
	}
	token, err := os.ReadFile(serviceAccount + "token")
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(authority) {
		return fmt.Errorf("%sca.crt holds no certificate", serviceAccount)
	}
	client := http.Client{
		Timeout:   30 * time.Second,
		Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}},
	}
	server := net.JoinHostPort(os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT"))
	request, err := http.NewRequest(http.MethodGet, "https://"+server+path, nil)
	if err != nil {
		return err
	}
	request.Header.Set("Authorization", "Bearer "+string(token))
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	fmt.Println(response.Status)
	_, err = io.Copy(os.Stdout, response.Body)
	return err
}

func run(arguments []string) error {
	switch {
	case len(arguments) == 1 && arguments[0] == "pause":
		return pause()
	case len(arguments) == 3 && arguments[0] == "resolve":
		limit, err := time.ParseDuration(arguments[2])
		if err != nil {
			return err
		}
		return resolve(arguments[1], limit)
	case len(arguments) == 2 && arguments[0] == "api":
		return callAPI(arguments[1])
	}
	return fmt.Errorf("%q is not a call this program knows\n%s", arguments, usage)
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "probe:", err)
		os.Exit(1)
	}
}
