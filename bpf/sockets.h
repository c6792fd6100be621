/* The service addresses that a socket of the node talks to, kept with the socket. */
#ifndef HYBRID_PROXY_SOCKETS_H
#define HYBRID_PROXY_SOCKETS_H

#include "config.h"

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct socket_state);
} sockets SEC(".maps");

#endif
