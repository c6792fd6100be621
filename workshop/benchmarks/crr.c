/* Connect, request, response, close: the lightest client and server that do it with blocking sockets.
 *
 *   crr serve PORT             answers for ever: reads 64 bytes, writes 256, closes
 *   crr ask ADDRESS PORT SEC   as often as it can for SEC seconds; prints connections, seconds and failures, then
 *                              median and 99th percentile of an exchange in microseconds
 *   crr ask ADDRESS PORT SEC RATE   the same, RATE times a second
 *   crr sink PORT              reads whatever comes, one connection after the other
 *   crr pour ADDRESS PORT SEC  one connection, as much as it takes; prints bytes and seconds
 *   crr catch PORT             reads datagrams and answers none
 *   crr throw ADDRESS PORT SEC FROM   small datagrams of one port, as often as it can; prints datagrams and seconds
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

enum sizes { REQUEST = 64, RESPONSE = 256, PIECE = 1 << 17, SLOWEST = 100000 };

static long times[SLOWEST + 1]; /* exchanges by microseconds, the last for all that took longer */

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

static int listen_at(const char *port)
{
	struct sockaddr_in a = socket_address("0.0.0.0", port);
	int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;

	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (bind(listener, (struct sockaddr *)&a, sizeof(a)) || listen(listener, 1024))
		give_up("listening");
	printf("ready\n");
	fflush(stdout);
	return listener;
}

static void serve(const char *port)
{
	int listener = listen_at(port);
	char buffer[RESPONSE] = {0};

	for (;;) {
		int s = accept(listener, NULL, NULL);

		if (s < 0)
			continue;
		if (recv(s, buffer, REQUEST, MSG_WAITALL) == REQUEST)
			send(s, buffer, RESPONSE, MSG_NOSIGNAL);
		close(s);
	}
}

static void sink(const char *port)
{
	static char buffer[PIECE];
	int listener = listen_at(port);

	for (;;) {
		int s = accept(listener, NULL, NULL);

		while (s >= 0 && recv(s, buffer, PIECE, 0) > 0)
			;
		close(s);
	}
}

static void pour(const char *address, const char *port, const char *time)
{
	static char buffer[PIECE];
	struct sockaddr_in to = socket_address(address, port);
	int s = socket(AF_INET, SOCK_STREAM, 0);
	double start, end, now;
	long long sent = 0;

	if (s < 0 || connect(s, (const struct sockaddr *)&to, sizeof(to)))
		give_up("connecting");
	start = seconds();
	end = start + atof(time);
	do {
		ssize_t piece = send(s, buffer, PIECE, MSG_NOSIGNAL);

		if (piece < 0)
			give_up("sending");
		sent += piece;
		now = seconds();
	} while (now < end);
	printf("%lld %.6f\n", sent, now - start);
	close(s);
}

static int datagram_socket(const char *port)
{
	struct sockaddr_in a = socket_address("0.0.0.0", port);
	int s = socket(AF_INET, SOCK_DGRAM, 0);

	if (s < 0 || bind(s, (struct sockaddr *)&a, sizeof(a)))
		give_up("binding");
	return s;
}

static void catch_all(const char *port)
{
	int s = datagram_socket(port);
	char buffer[REQUEST];

	printf("ready\n");
	fflush(stdout);
	while (recv(s, buffer, REQUEST, 0) >= 0)
		;
}

static void throw(const char *address, const char *port, const char *time, const char *from)
{
	struct sockaddr_in to = socket_address(address, port);
	int s = datagram_socket(from);
	char buffer[REQUEST] = {0};
	double start, now;
	long sent = 0;

	if (connect(s, (const struct sockaddr *)&to, sizeof(to)))
		give_up("connecting");
	start = seconds();
	do {
		if (send(s, buffer, REQUEST, 0) != REQUEST)
			give_up("sending");
		now = ++sent % 64 ? start : seconds();
	} while (now < start + atof(time));
	printf("%ld %.6f\n", sent, now - start);
	close(s);
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

/* The smallest time that this share of the exchanges does not exceed. */
static long quantile(long all, double share)
{
	long seen = 0;

	for (int i = 0; i <= SLOWEST; i++) {
		seen += times[i];
		if (seen >= all * share)
			return i;
	}
	return SLOWEST;
}

/* Sleep until that second of the monotonic clock. */
static void wait_until(double when)
{
	struct timespec t = {.tv_sec = (time_t)when, .tv_nsec = (long)((when - (time_t)when) * 1e9)};

	clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
}

static void ask(const char *address, const char *port, const char *time, double rate)
{
	struct sockaddr_in to = socket_address(address, port);
	double start = seconds(), end = start + atof(time), before = start, now;
	long done = 0, failed = 0;

	do {
		if (rate) {
			wait_until(start + (done + failed) / rate);
			before = seconds();
		}
		if (ask_once(&to))
			failed++;
		else
			done++;
		now = seconds();
		times[(now - before) * 1e6 < SLOWEST ? (long)((now - before) * 1e6) : SLOWEST]++;
		before = now;
	} while (now < end);
	printf("%ld %.6f %ld %ld %ld\n", done, now - start, failed, quantile(done + failed, 0.5),
	       quantile(done + failed, 0.99));
}

int main(int argc, char **argv)
{
	if (argc == 3 && !strcmp(argv[1], "serve"))
		serve(argv[2]);
	else if (argc == 3 && !strcmp(argv[1], "sink"))
		sink(argv[2]);
	else if (argc == 5 && !strcmp(argv[1], "ask"))
		ask(argv[2], argv[3], argv[4], 0);
	else if (argc == 6 && !strcmp(argv[1], "ask"))
		ask(argv[2], argv[3], argv[4], atof(argv[5]));
	else if (argc == 5 && !strcmp(argv[1], "pour"))
		pour(argv[2], argv[3], argv[4]);
	else if (argc == 3 && !strcmp(argv[1], "catch"))
		catch_all(argv[2]);
	else if (argc == 6 && !strcmp(argv[1], "throw"))
		throw(argv[2], argv[3], argv[4], argv[5]);
	else
		fprintf(stderr, "crr serve|sink|catch PORT, crr ask|pour|throw ADDRESS PORT SECONDS [RATE|FROM]\n");
	return argc >= 5 ? 0 : 2;
}
