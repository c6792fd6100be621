/* Exchanges with blocking sockets: the lightest client and server that do it.
 *
 *   crr serve PORT             answers for ever: reads 64 bytes, writes 256, closes
 *   crr ask ADDRESS PORT SEC   connections, as often as it can for SEC seconds
 *   crr ask ADDRESS PORT SEC RATE   the same, RATE times a second
 *   crr echo PORT              answers datagrams with themselves
 *   crr query ADDRESS PORT SEC a new socket, a datagram, an answer, as a resolver's
 *   crr talk ADDRESS PORT SEC  datagrams and answers of one connected socket
 *   crr sink PORT              reads whatever comes, one connection after the other
 *   crr pour ADDRESS PORT SEC  one connection, as much as it takes
 *   crr catch PORT             reads datagrams and answers none
 *   crr throw ADDRESS PORT SEC small datagrams of one flow, as often as it can
 *
 * Clients print exchanges (bytes, datagrams), seconds and failures, median and 99th percentile of an exchange in
 * microseconds, and the CPU seconds that the process took for them, without its start.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum sizes { REQUEST = 64, RESPONSE = 256, PIECE = 1 << 17, SLOWEST = 100000 };

static long times[SLOWEST + 1]; /* exchanges by microseconds, the last for all that took longer */

static double read_clock(clockid_t clock)
{
	struct timespec t;

	clock_gettime(clock, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static double seconds(void)
{
	return read_clock(CLOCK_MONOTONIC);
}

static double cpu_seconds(void)
{
	return read_clock(CLOCK_PROCESS_CPUTIME_ID);
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

static void report(long long done, double took, long failed, double cpu)
{
	printf("%lld %.6f %ld %ld %ld %.9f\n", done, took, failed, quantile(done + failed, 0.5),
	       quantile(done + failed, 0.99), cpu);
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
	double start, end, now, cpu;
	long long sent = 0;

	if (s < 0 || connect(s, (const struct sockaddr *)&to, sizeof(to)))
		give_up("connecting");
	cpu = cpu_seconds();
	start = seconds();
	end = start + atof(time);
	do {
		ssize_t piece = send(s, buffer, PIECE, MSG_NOSIGNAL);

		if (piece < 0)
			give_up("sending");
		sent += piece;
		now = seconds();
	} while (now < end);
	report(sent, now - start, 0, cpu_seconds() - cpu);
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

static void echo(const char *port)
{
	int s = datagram_socket(port);
	struct sockaddr_in from;
	socklen_t length = sizeof(from);
	char buffer[REQUEST];

	printf("ready\n");
	fflush(stdout);
	for (;; length = sizeof(from))
		if (recvfrom(s, buffer, REQUEST, 0, (struct sockaddr *)&from, &length) == REQUEST)
			sendto(s, buffer, REQUEST, 0, (const struct sockaddr *)&from, length);
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

static void throw(const char *address, const char *port, const char *time)
{
	struct sockaddr_in to = socket_address(address, port);
	int s = datagram_socket("40000");
	char buffer[REQUEST] = {0};
	double start, now, cpu;
	long sent = 0;

	if (connect(s, (const struct sockaddr *)&to, sizeof(to)))
		give_up("connecting");
	cpu = cpu_seconds();
	start = seconds();
	do {
		if (send(s, buffer, REQUEST, 0) != REQUEST)
			give_up("sending");
		now = ++sent % 64 ? start : seconds();
		if (now > start)
			sched_yield(); /* the server reads in time, before its socket is full */
	} while (now < start + atof(time));
	report(sent, now - start, 0, cpu_seconds() - cpu);
	close(s);
}

static int patient_socket(int kind)
{
	int s = socket(AF_INET, kind, 0);
	struct timeval patience = {.tv_sec = 2};

	if (s < 0)
		give_up("socket");
	setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
	setsockopt(s, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
	return s;
}

/* One whole exchange; 0 when it was complete. */
static int ask_once(const struct sockaddr_in *to)
{
	int s = patient_socket(SOCK_STREAM), failed = 1;
	char buffer[RESPONSE] = {0};

	if (!connect(s, (const struct sockaddr *)to, sizeof(*to)) &&
	    send(s, buffer, REQUEST, MSG_NOSIGNAL) == REQUEST && recv(s, buffer, RESPONSE, MSG_WAITALL) == RESPONSE &&
	    recv(s, buffer, 1, 0) == 0)
		failed = 0;
	close(s);
	return failed;
}

static int query_once(const struct sockaddr_in *to)
{
	int s = patient_socket(SOCK_DGRAM), failed;
	char buffer[REQUEST] = {0};

	failed = sendto(s, buffer, REQUEST, 0, (const struct sockaddr *)to, sizeof(*to)) != REQUEST ||
		 recv(s, buffer, REQUEST, 0) != REQUEST;
	close(s);
	return failed;
}

static int talk_once(const struct sockaddr_in *to)
{
	static int s = -1;
	char buffer[REQUEST] = {0};

	if (s < 0) {
		s = patient_socket(SOCK_DGRAM);
		if (connect(s, (const struct sockaddr *)to, sizeof(*to)))
			give_up("connecting");
	}
	return send(s, buffer, REQUEST, 0) != REQUEST || recv(s, buffer, REQUEST, 0) != REQUEST;
}

/* Sleep until that second of the monotonic clock. */
static void wait_until(double when)
{
	struct timespec t = {.tv_sec = (time_t)when, .tv_nsec = (long)((when - (time_t)when) * 1e9)};

	clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
}

static void ask(int (*once)(const struct sockaddr_in *), char **argv, double rate)
{
	struct sockaddr_in to = socket_address(argv[2], argv[3]);
	double cpu = cpu_seconds(), start = seconds(), end = start + atof(argv[4]), before = start, now;
	long done = 0, failed = 0;

	do {
		if (rate) {
			wait_until(start + (done + failed) / rate);
			before = seconds();
		}
		if (once(&to))
			failed++;
		else
			done++;
		now = seconds();
		times[(now - before) * 1e6 < SLOWEST ? (long)((now - before) * 1e6) : SLOWEST]++;
		before = now;
	} while (now < end);
	report(done, now - start, failed, cpu_seconds() - cpu);
}

int main(int argc, char **argv)
{
	if (argc == 3 && !strcmp(argv[1], "serve"))
		serve(argv[2]);
	else if (argc == 3 && !strcmp(argv[1], "sink"))
		sink(argv[2]);
	else if (argc == 5 && !strcmp(argv[1], "ask"))
		ask(ask_once, argv, 0);
	else if (argc == 6 && !strcmp(argv[1], "ask"))
		ask(ask_once, argv, atof(argv[5]));
	else if (argc == 5 && !strcmp(argv[1], "query"))
		ask(query_once, argv, 0);
	else if (argc == 5 && !strcmp(argv[1], "talk"))
		ask(talk_once, argv, 0);
	else if (argc == 3 && !strcmp(argv[1], "echo"))
		echo(argv[2]);
	else if (argc == 5 && !strcmp(argv[1], "pour"))
		pour(argv[2], argv[3], argv[4]);
	else if (argc == 3 && !strcmp(argv[1], "catch"))
		catch_all(argv[2]);
	else if (argc == 5 && !strcmp(argv[1], "throw"))
		throw(argv[2], argv[3], argv[4]);
	else
		fprintf(stderr, "crr serve|echo|sink|catch PORT, crr ask|query|talk|pour|throw "
				"ADDRESS PORT SECONDS [RATE]\n");
	return argc >= 5 ? 0 : 2;
}
