/* cgroup hooks of the node's own sockets. */
#include "socket.h"

SEC("cgroup/connect4")
int connect4(struct bpf_sock_addr *ctx)
{
	return connect_socket(ctx, false);
}

SEC("cgroup/connect6")
int connect6(struct bpf_sock_addr *ctx)
{
	return connect_socket(ctx, true);
}

SEC("cgroup/sendmsg4")
int sendmsg4(struct bpf_sock_addr *ctx)
{
	return send_datagram(ctx, false);
}

SEC("cgroup/sendmsg6")
int sendmsg6(struct bpf_sock_addr *ctx)
{
	return send_datagram(ctx, true);
}

SEC("cgroup/recvmsg4")
int recvmsg4(struct bpf_sock_addr *ctx)
{
	return receive_datagram(ctx, false);
}

SEC("cgroup/recvmsg6")
int recvmsg6(struct bpf_sock_addr *ctx)
{
	return receive_datagram(ctx, true);
}

SEC("cgroup/getpeername4")
int getpeername4(struct bpf_sock_addr *ctx)
{
	return show_peer(ctx, false);
}

SEC("cgroup/getpeername6")
int getpeername6(struct bpf_sock_addr *ctx)
{
	return show_peer(ctx, true);
}

char LICENSE[] SEC("license") = "GPL";
