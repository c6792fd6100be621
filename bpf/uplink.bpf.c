/* tc at an uplink: clients beyond the node, other nodes' pods, and what this node sends past its sockets' hooks.
 *
 * Ingress translates what they send to a service, and puts back clients' addresses where the node's replaced them.
 * Egress turns backends' answers into the service's, translates what kernel clients and raw sockets of this node send
 * to a service, and keeps packets for addresses that no service has from leaving.
 */
#include "client.h"

SEC("tc")
int uplink_ingress(struct __sk_buff *skb)
{
	return ingress(skb, AT_UPLINK);
}

SEC("tc")
int uplink_egress(struct __sk_buff *skb)
{
	return egress(skb, AT_NODE);
}

char LICENSE[] SEC("license") = "GPL";
