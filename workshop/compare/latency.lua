-- For wrk -s: what it measured, as one JSON object in the last line. Times are microseconds. The histogram counts requests
-- by sixteenths of an octave: bin n has those of 2^(n/16) to 2^((n+1)/16).
local function histogram(latency)
   local bins, fields = {}, {}
   for number = 1, #latency do
      local time, count = latency(number)
      local bin = math.floor(16 * math.log(math.max(time, 1)) / math.log(2))
      bins[bin] = (bins[bin] or 0) + count
   end
   for bin, count in pairs(bins) do
      fields[#fields + 1] = string.format('"%d":%.0f', bin, count)
   end
   return table.concat(fields, ",")
end

function done(summary, latency, _)
   local e = summary.errors
   io.write(string.format(
      '{"requests":%.0f,"duration":%.0f,"failed":%.0f,"p50":%.0f,"p90":%.0f,"p99":%.0f,"histogram":{%s}}\n',
      summary.requests, summary.duration, e.connect + e.read + e.write + e.status + e.timeout,
      latency:percentile(50), latency:percentile(90), latency:percentile(99), histogram(latency)
   ))
end
