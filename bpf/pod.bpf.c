/* tc at the host side of a pod's interface: translate what the pod sends to a service, undo what it receives.
 *
 * Ingress (from the pod) is where a service address becomes a backend's, egress (to the pod) where a backend's
 * reply becomes the service's again: between the two, routing, rp_filter, conntrack and policies see one plain,
 * symmetric flow from client to backend. Once that flow is established both ends are handed over directly.
 */
#include "client.h"

SEC("tc")
int pod_ingress(struct __sk_buff *skb)
{
	return ingress(skb, AT_POD);
}

SEC("tc")
int pod_egress(struct __sk_buff *skb)
{
	return egress(skb, AT_POD);
}

char LICENSE[] SEC("license") = "GPL";
