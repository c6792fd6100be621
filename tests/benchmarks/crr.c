/* Connect, request, response, close: the lightest client and server that do it with blocking sockets.
 *
 *   crr serve PORT             answers for ever: reads 64 bytes, writes 256, closes
 *   crr ask ADDRESS PORT SEC   as often as it can for SEC seconds; prints connections, seconds and failures
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum sizes { REQUEST = 64, RESPONSE = 256 };

static double seconds(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static struct sockaddr_in socket_address(const char *address, const char *port)
{
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(atoi(port))};

	if (inet_pton(AF_INET, address, &a.sin_addr) != 1) {
		fprintf(stderr, "crr: %s is no IPv4 address\n", address);
		exit(2);
	}
	return a;
}

static void give_up(const char *what)
{
	fprintf(stderr, "crr: %s: %s\n", what, strerror(errno));
	exit(1);
}

static void serve(const char *port)
{
	struct sockaddr_in a = socket_address("0.0.0.0", port);
	int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
	char buffer[RESPONSE] = {0};

	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (bind(listener, (struct sockaddr *)&a, sizeof(a)) || listen(listener, 1024))
		give_up("listening");
	printf("ready\n");
	fflush(stdout);
	for (;;) {
		int s = accept(listener, NULL, NULL);

		if (s < 0)
			continue;
		if (recv(s, buffer, REQUEST, MSG_WAITALL) == REQUEST)
			send(s, buffer, RESPONSE, MSG_NOSIGNAL);
		close(s);
	}
}

/* One whole exchange; 0 when it was complete. */
static int ask_once(const struct sockaddr_in *to)
{
	int s = socket(AF_INET, SOCK_STREAM, 0), failed = 1;
	struct timeval patience = {.tv_sec = 2};
	char buffer[RESPONSE] = {0};

	if (s < 0)
		give_up("socket");
	setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
	setsockopt(s, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
	if (!connect(s, (const struct sockaddr *)to, sizeof(*to)) &&
	    send(s, buffer, REQUEST, MSG_NOSIGNAL) == REQUEST && recv(s, buffer, RESPONSE, MSG_WAITALL) == RESPONSE &&
	    recv(s, buffer, 1, 0) == 0)
		failed = 0;
	close(s);
	return failed;
}

static void ask(const char *address, const char *port, const char *time)
{
	struct sockaddr_in to = socket_address(address, port);
	double start = seconds(), end = start + atof(time), now;
	long done = 0, failed = 0;

	do {
		for (int i = 0; i < 16; i++) {
			if (ask_once(&to))
				failed++;
			else
				done++;
		}
		now = seconds();
	} while (now < end);
	printf("%ld %.6f %ld\n", done, now - start, failed);
}

int main(int argc, char **argv)
{
	if (argc == 3 && !strcmp(argv[1], "serve"))
		serve(argv[2]);
	else if (argc == 5 && !strcmp(argv[1], "ask"))
		ask(argv[2], argv[3], argv[4]);
	else
		fprintf(stderr, "crr serve PORT | crr ask ADDRESS PORT SECONDS\n");
	return argc == 5 ? 0 : 2;
}
