-- For wrk -s: what it measured, as one JSON object in the last line. Times are microseconds.
local shares = { 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9 }

function done(summary, latency, _)
   local times = {}
   for number, share in ipairs(shares) do
      times[number] = string.format("%.0f", latency:percentile(share))
   end
   local e = summary.errors
   io.write(string.format(
      '{"requests":%.0f,"duration":%.0f,"failed":%.0f,"latency":[%s]}\n',
      summary.requests, summary.duration, e.connect + e.read + e.write + e.status + e.timeout, table.concat(times, ",")
   ))
end
