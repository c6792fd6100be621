/* SCTP's checksum after a change of ports, computed without reading the data. A CRC is linear: the CRC of a packet
 * whose first word changed differs by the CRC of the change, shifted by the length of the rest.
 *
 * Polynomials are as in RFC 9260, appendix A: 32 bits, reflected, x^0 is the highest bit.
 */
#ifndef HYBRID_PROXY_CRC_H
#define HYBRID_PROXY_CRC_H

#include "config.h"

#define CRC32C 0x82f63b78u /* Castagnoli's, without x^32 */
#define LENGTH_BITS 16	   /* of the number of bytes behind the ports */

/* Multiplies two polynomials modulo CRC32C. The function is global, so the verifier checks these loops once. */
__noinline __u32 crc_product(__u32 a, __u32 b)
{
	__u32 product = 0;

#pragma clang loop unroll(disable)
	for (int i = 0; i < 32; i++) {
		product ^= -(a >> 31) & b;
		a <<= 1;
		b = b >> 1 ^ (-(b & 1) & CRC32C);
	}
	return product;
}

/* `sum`, moved by so many bytes: times x^8, as often. Squares of x^8 are made on the way. */
__noinline __u32 crc_moved(__u32 sum, __u32 bytes)
{
	__u32 power = 1u << 23; /* x^8 */

#pragma clang loop unroll(disable)
	for (int i = 0; i < LENGTH_BITS; i++) {
		if (!bytes)
			break;
		if (bytes & 1)
			sum = crc_product(sum, power);
		power = crc_product(power, power);
		bytes >>= 1;
	}
	return sum;
}

/* Difference of the CRC of `length` bytes when the first four of them, as they lie in memory, change. */
INLINE __u32 crc_difference(__be32 from, __be32 to, __u32 length)
{
	__u32 change = from ^ to;

	/* A reflected CRC takes the first byte in its lowest bits: the word as a little-endian machine reads it. */
	change = __le32_to_cpu(change);
	return crc_moved(change, length);
}

#endif
