// The status page: asks /v1/status every few seconds and shows what it says. Text reaches the page as text only.

import { draw, scale } from "./chart.js";

const EVERY_MS = 5000;
const PATIENCE_MS = 10000;
const TOKEN = "kvcdn-token";
const $ = (id) => document.getElementById(id);
const NONE = "–";

let latest = null;
let timer = 0;
let round = 0;

// -- words for numbers ------------------------------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

function number(value) {
  if (value < 100000) return whole.format(value);
  const units = ["", " k", " M", " G", " T"];
  let place = 0;
  while (value >= 999.5 && place < units.length - 1) [value, place] = [value / 1000, place + 1];
  return `${value.toPrecision(3)}${units[place]}`;
}

function bytes(value) {
  if (value === null) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let place = 0;
  while (value >= 999.5 && place < units.length - 1) [value, place] = [value / 1000, place + 1];
  return `${place ? value.toPrecision(3) : Math.round(value)} ${units[place]}`;
}

function percent(share) {
  if (share === null) return NONE;
  // Never "100 %" of what is not all.
  const shown = Math.min(share * 100, share < 1 ? 99.9 : 100);
  return `${shown.toFixed(shown === 100 ? 0 : 1)}\u00a0%`;
}

function duration(seconds) {
  if (seconds === 0) return "0 s";
  if (seconds < 1) return `${seconds < 0.1 ? (seconds * 1000).toPrecision(2) : Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toPrecision(2)} s`;
  const units = [["d", 86400], ["h", 3600], ["min", 60]];
  const at = units.findIndex(([, size]) => seconds >= size);
  const [unit, size] = units[at];
  const rest = units[at + 1] ? Math.floor((seconds % size) / units[at + 1][1]) : 0;
  return `${whole.format(Math.floor(seconds / size))} ${unit}${rest ? ` ${rest} ${units[at + 1][0]}` : ""}`;
}

const latency = (found) => (found.answers ? `${duration(found.median)}, 95 % within ${duration(found.p95)}` : "no answer yet");
const ratio = (part, all) => (all > 0 ? part / all : null);
const sum = (values) => values.reduce((a, b) => a + b, 0);

// -- small pieces of page ---------------------------------------------------------------------------------------------

function element(name, text, className) {
  const node = document.createElement(name);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}

function terms(list, pairs) {
  list.replaceChildren(...pairs.map(([term, value]) => {
    const group = element("div");
    group.append(element("dt", term), element("dd", value));
    return group;
  }));
}

// `columns` are [heading, row => text, is words].
function table(node, rows, columns, empty) {
  const head = element("thead"), body = element("tbody"), line = element("tr");
  for (const [heading, , words] of columns) {
    const cell = element("th", heading, words ? "text" : "");
    cell.scope = "col";
    line.append(cell);
  }
  head.append(line);
  for (const row of rows) {
    const entry = element("tr");
    for (const [, show, words] of columns) {
      const text = show(row);
      const cell = element("td", text, words ? "text" : "");
      if (words) cell.title = text; // what does not fit
      entry.append(cell);
    }
    body.append(entry);
  }
  if (!rows.length) {
    const entry = element("tr"), cell = element("td", empty, "none");
    cell.colSpan = columns.length;
    entry.append(cell);
    body.append(entry);
  }
  node.replaceChildren(head, body);
}

// -- the sections -----------------------------------------------------------------------------------------------------

function tiles({ traffic, saved, history }) {
  const hour = history[0];
  $("ratio").textContent = percent(ratio(sum(hour.hit_bytes), sum(hour.bytes)));
  $("ratio-more").textContent = `of bytes; ${percent(ratio(sum(hour.hits), sum(hour.requests)))} of requests`;
  $("delivered").textContent = bytes(traffic.bytes);
  $("delivered-more").textContent = `in ${number(traffic.requests)} answers since the start`;
  $("saved").replaceChildren(number(saved.prefill_tokens), element("span", " tokens", "unit"));
  $("saved-more").textContent = saved.prefill_seconds === null
    ? "for time, set prefill_speeds"
    : `${duration(saved.prefill_seconds)} of prefilling`;
  $("avoided").textContent = bytes(saved.origin_bytes);
  const peers = traffic.peer_bytes ? `, ${bytes(traffic.peer_bytes)} from peers` : "";
  $("avoided-more").textContent = `${bytes(traffic.origin_bytes)} came from it${peers}`;
}

// The steps of a ring, filled up in front, so that the time axis always spans the same.
function column(ring, values, missing) {
  return [...Array(Math.max(ring.steps - values.length, 0)).fill(missing), ...values];
}

function clock(ring, now, step) {
  const back = (ring.steps - 1 - step) * ring.step_seconds;
  return new Date((now - back) * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
}

function charts({ history, time }) {
  const chosen = Number(document.querySelector("input[name=span]:checked").value);
  const ring = history[chosen], last = ring.steps - 1;
  const span = chosen ? "24 hours" : "hour";
  const shares = (part, all) => column(ring, part.map((value, i) => ratio(value, all[i])), null);
  // An unfinished step says little of a rate, unless there is no other.
  const open = ring.unfinished_seconds, tells = (count) => open >= 10 || count === 1;
  const width = (i, count) => (i < count - 1 ? ring.step_seconds : tells(count) ? Math.max(open, 1) : 0);
  const rates = (values) => column(ring, values.map((value, i) => ratio(value, width(i, values.length))), null);
  const marks = [0, last / 2, last].map((step) => [step, clock(ring, time, Math.round(step))]);
  const ago = (step) => clock(ring, time, step);
  const [byBytes, byRequests] = [shares(ring.hit_bytes, ring.bytes), shares(ring.hits, ring.requests)];
  const total = percent(ratio(sum(ring.hit_bytes), sum(ring.bytes)));
  draw($("ratio-chart"), {
    lines: [byBytes, byRequests], top: 1, format: (share) => `${Math.round(share * 100)} %`, marks, ago,
    label: `Hit ratio over the last ${span}: ${total} by bytes, ${percent(ratio(sum(ring.hits), sum(ring.requests)))} by requests`,
    readout: $("ratio-readout"),
  });
  const delivered = rates(ring.bytes), filled = rates(ring.origin_bytes);
  draw($("rate-chart"), {
    lines: [delivered, filled], top: scale(Math.max(...delivered, ...filled, 1000)), format: (rate) => `${bytes(rate)}/s`, marks, ago,
    label: `Bytes a second over the last ${span}: ${bytes(sum(ring.bytes))} delivered, ${bytes(sum(ring.origin_bytes))} from the origin`,
    readout: $("rate-readout"),
  });
  if ($("history").closest("details").open) {
    const first = ring.steps - ring.bytes.length;
    const rows = ring.bytes.map((_, i) => i).filter((i) => ring.requests[i] || ring.origin_bytes[i]).reverse();
    table($("history"), rows, [
      ["Time", (i) => clock(ring, time, first + i)],
      ["Hits by bytes", (i) => percent(ratio(ring.hit_bytes[i], ring.bytes[i]))],
      ["By requests", (i) => percent(ratio(ring.hits[i], ring.requests[i]))],
      ["Requests", (i) => number(ring.requests[i])],
      ["Delivered", (i) => bytes(ring.bytes[i])],
      ["From the origin", (i) => bytes(ring.origin_bytes[i])],
    ], "Nothing asked for yet");
  }
}

function disk({ disk: found }) {
  const share = found.used_bytes / found.capacity_bytes;
  const meter = $("disk-meter");
  meter.setAttribute("aria-valuenow", (share * 100).toFixed(1));
  meter.setAttribute("aria-valuetext", `${bytes(found.used_bytes)} of ${bytes(found.capacity_bytes)}`);
  meter.firstElementChild.style.minWidth = found.used_bytes ? "2px" : "0";
  meter.firstElementChild.style.width = `${Math.min(share, 1) * 100}%`;
  const dropped = Object.entries(found.dropped).map(([harm, count]) => `${number(count)} ${harm}`).join(", ");
  terms($("disk"), [
    ["Used", `${bytes(found.used_bytes)} (${percent(share)})`],
    ["Capacity", bytes(found.capacity_bytes)],
    ["Free on the disk", bytes(found.free_bytes)],
    ["Objects", number(found.objects)],
    ["Pinned", found.pinned_documents ? `${number(found.pinned_documents)} documents, ${bytes(found.pinned_bytes)}` : "none"],
    ["Evicted", number(found.evicted)],
    ["Dropped", dropped || "none"],
    ...(found.quarantine_bytes ? [["In quarantine", bytes(found.quarantine_bytes)]] : []),
  ]);
}

function places({ origins, peers }) {
  for (const [list, found] of [[$("origins"), origins], [$("peers"), peers]]) list.replaceChildren(...found.map(place));
  $("peers-title").hidden = !peers.length;
}

function place(origin) {
  const item = element("li"), where = element("div", undefined, "where"), list = element("dl");
  const down = origin.retry_seconds ? `Down, tried again in ${duration(origin.retry_seconds)}` : "Down, about to be tried";
  where.append(element("span", origin.url), element("span", origin.up ? "Up" : down, `pill ${origin.up ? "good" : "bad"}`));
  terms(list, [
    ["Objects", latency(origin.latency.get)],
    ["Lookups", latency(origin.latency.stat)],
    ["Failures in a row", number(origin.failures)],
    ["Failed verification", number(origin.verification_failures)],
  ]);
  item.append(where, list);
  return item;
}

function hot({ hot: found }) {
  const model = ["Model", (row) => row.model, true];
  const asked = ["Asked lately", (row) => number(row.asked)];
  table($("prefixes"), found.prefixes, [
    ["Ends with", (row) => row.name], model, ["Blocks", (row) => number(row.blocks)], asked,
  ], "No prefix was looked up lately");
  table($("objects"), found.objects, [
    ["Object", (row) => row.name], model, ["Sent", (row) => bytes(row.bytes)], asked, ["Cached", (row) => (row.cached ? "yes" : "no")],
  ], "No object was asked for lately");
}

function accounts({ tenants, models }) {
  const columns = [
    ["Delivered", (row) => bytes(row.bytes)],
    ["Answers", (row) => number(row.requests)],
    ["Hits by bytes", (row) => percent(ratio(row.hit_bytes, row.bytes))],
    ["Prefill saved", (row) => `${number(row.tokens)} tokens${row.seconds ? `, ${duration(row.seconds)}` : ""}`],
  ];
  const limited = ["Over a limit", (row) => number(row.limited)];
  table($("tenants"), tenants, [["Tenant", (row) => row.tenant, true], ...columns, limited], "Nobody has asked yet");
  table($("models"), models, [["Model", (row) => row.model, true], ...columns], "Nothing asked for yet");
}

function fills({ fills: found }) {
  const names = Object.keys(found).sort((a, b) => found[b] - found[a]);
  terms($("fills"), names.length ? names.map((name) => [name, number(found[name])]) : [["Ended so far", "none"]]);
}

function show(status) {
  latest = status;
  $("entry").hidden = true;
  $("figures").hidden = false;
  for (const part of [tiles, charts, disk, places, hot, accounts, fills]) part(status);
  $("version").textContent = `kvcdn ${status.version}, up for ${duration(status.uptime_seconds)}`;
  $("updated").textContent = `at ${new Date(status.time * 1000).toLocaleTimeString()}`;
  state("Live", "good");
}

// Told only when it changes: the element is announced to those who listen.
function state(words, kind) {
  document.body.classList.toggle("stale", kind !== "good");
  if ($("state").textContent === words) return;
  $("state").textContent = words;
  $("state").className = `pill ${kind}`;
}

// -- asking -----------------------------------------------------------------------------------------------------------

function askForToken(had) {
  sessionStorage.removeItem(TOKEN);
  $("figures").hidden = true;
  $("forget").hidden = true;
  $("entry").hidden = false;
  $("refused").textContent = had;
  state("Locked", "");
  $("updated").textContent = "";
  $("token").focus();
}

async function look() {
  clearTimeout(timer);
  const mine = ++round;
  const token = sessionStorage.getItem(TOKEN);
  try {
    const headers = token ? { Authorization: `Bearer ${token}` } : {};
    const signal = AbortSignal.timeout(PATIENCE_MS);
    const answer = await fetch("v1/status", { headers, signal, cache: "no-store", credentials: "omit", redirect: "error" });
    if (mine !== round) return;
    if (answer.status === 401) return askForToken(token ? "That token is not one that this edge takes, or has expired." : "");
    if (answer.status === 403) {
      const words = (await answer.text()).trim();
      return askForToken(token ? "That token does not have the scope stats." : words);
    }
    if (!answer.ok) throw new Error(`the edge answers ${answer.status}`);
    const status = await answer.json();
    if (mine !== round) return;
    show(status);
    $("forget").hidden = !token;
  } catch (error) {
    if (mine !== round) return;
    state(error instanceof TypeError || error.name === "TimeoutError" ? "Not reachable" : "Trouble", "bad");
    console.warn(error.message);
  }
  if (!document.hidden) timer = setTimeout(look, EVERY_MS);
}

$("host").textContent = location.host;
$("entry").addEventListener("submit", (event) => {
  event.preventDefault();
  const token = $("token").value.trim();
  $("token").value = "";
  if (!/^[\x21-\x7e]+$/.test(token)) {
    $("refused").textContent = "That is not a token.";
    return;
  }
  sessionStorage.setItem(TOKEN, token);
  look();
});
$("forget").addEventListener("click", () => {
  clearTimeout(timer);
  round += 1;
  askForToken("");
});
for (const input of document.querySelectorAll("input[name=span]")) input.addEventListener("change", () => latest && charts(latest));
$("history").closest("details").addEventListener("toggle", () => latest && charts(latest));
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : look()));
let width = 0;
new ResizeObserver(() => {
  if (latest && width !== $("ratio-chart").clientWidth) {
    width = $("ratio-chart").clientWidth;
    charts(latest);
  }
}).observe($("figures"));
look();
