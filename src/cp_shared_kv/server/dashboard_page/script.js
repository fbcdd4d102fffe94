
"use strict";
const POLL_MS = 2000, PATIENCE_MS = 8000, KEPT_SAMPLES = 150, FEWEST_SAMPLES = 30, KEY = "cpkv-api-key";
const STATES = ["locked", "cached", "free"];
const WORDS = { locked: "in use", cached: "cached", free: "free" };
const $ = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat("en-US");
const series = {};
let before = null, lastAnswer = "", cursor = null, replicated = false;

// Text and numbers ------------------------------------------------------------------------------

const say = (id, text) => { $(id).textContent = text; };
const count = (id, value) => { say(id, whole.format(value)); };
const pace = (value) => (value < 100 ? value.toFixed(1) : whole.format(Math.round(value)));
const percent = (part) => `${(100 * part).toFixed(1)}%`;

function bytes(value) {
  let unit = 0;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${value.toFixed(unit && value < 100 ? 1 : 0)} ${units[unit]}`;
}

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// How the connection is -------------------------------------------------------------------------

function show(status, text, problem = "") {
  $("status").dataset.status = status;
  if ($("status-text").textContent !== text) say("status-text", text);
  if ($("banner").textContent !== problem) say("banner", problem);
  $("banner").hidden = !problem;
}

function askForKey(problem) {
  show("refused", "no access", problem);
  $("figures").hidden = true;
  $("key-form").hidden = false;
  $("key").focus();
}

function unreachable(why) {
  const since = lastAnswer ? ` The figures below are those of ${lastAnswer}.` : "";
  show("unreachable", "not connected", `${why}${since} Trying again every ${POLL_MS / 1000} seconds.`);
  $("figures").classList.add("stale");
  before = null;
}

// Polling ---------------------------------------------------------------------------------------

async function poll() {
  const key = sessionStorage.getItem(KEY);
  let answer, state;
  try {
    answer = await fetch("dashboard/state", {
      headers: key ? { authorization: `Bearer ${key}` } : {},
      signal: AbortSignal.timeout(PATIENCE_MS),
      cache: "no-store",
    });
    if (answer.ok) state = await answer.json();
  } catch {
    return unreachable("The server does not answer.");
  }
  if (answer.status === 401) {
    sessionStorage.removeItem(KEY);
    return askForKey(key ? "The server refused this API key." : "This server asks for its API key.");
  }
  if (!answer.ok) return unreachable(`The server answered with status ${answer.status}.`);
  lastAnswer = new Date().toLocaleTimeString("en-GB");
  $("key-form").hidden = true;
  $("figures").hidden = false;
  render(state);
  if (state.healthy) show("live", `live, ${lastAnswer}`);
  else show("unwell", "not healthy", `The engine is not healthy: ${state.reason}`);
  $("figures").classList.toggle("stale", !state.usage);
}

let timer = 0, polling = false;

async function loop() {
  clearTimeout(timer);
  if (polling) return;
  polling = true;
  if (!document.hidden) await poll();
  polling = false;
  // A form that waits for its key is not asked over and over.
  if ($("key-form").hidden) timer = setTimeout(loop, POLL_MS);
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value);
  $("key").value = "";
  loop();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden && $("key-form").hidden) loop(); });

// Figures ---------------------------------------------------------------------------------------

function render(state) {
  const { capacity, usage } = state;
  replicated = capacity.shard_policy === "replicated" && capacity.cp_size > 1;
  say("served", `${state.model_name}, version ${state.version}`);
  document.title = `${state.model_name} - cp-shared-kv`;
  const groups = capacity.prefill_groups > 1 ? `${capacity.prefill_groups} groups of ` : "";
  say("capacity",
    `${whole.format(capacity.total_logical_tokens)} logical tokens: ${groups}${capacity.cp_size} ranks, ` +
    `${whole.format(capacity.physical_tokens_per_rank)} physical tokens each; pages of ${capacity.page_size}; ` +
    `${capacity.shard_policy.replace("_", " ")}; read by ${capacity.kv_read}; ` +
    `longest prompt ${whole.format(capacity.longest_prompt_tokens)}`);
  if (usage) renderUsage(usage, capacity, state.ranks);
  renderPools(state.pools, capacity);
  renderRanks(state.ranks);
  renderUnits(state.units, state.pools);
}

function renderUsage(usage, capacity, ranks) {
  const total = capacity.total_logical_tokens;
  const tokens = { locked: usage.used_tokens, cached: usage.evictable_tokens, free: usage.available_tokens };
  say("use-percent", percent(tokens.locked / total));
  count("used-tokens", tokens.locked);
  count("cached-tokens", tokens.cached);
  count("free-tokens", tokens.free);
  for (const state of STATES) $("use-bar").querySelector(`.${state}`).style.width = percent(tokens[state] / total);
  $("use-bar").setAttribute("aria-label", STATES.map((s) => `${whole.format(tokens[s])} tokens ${WORDS[s]}`).join(", "));

  const running = usage.prefill_requests + usage.decode_requests;
  const queued = usage.queued_requests;
  say("recent-hit-rate", usage.recent_cache_hit_rate === null ? "no prompts" : percent(usage.recent_cache_hit_rate));
  say("hit-rate", usage.prompt_tokens_total ? percent(usage.cache_hit_rate) : "none");
  count("running", running);
  count("prefill-requests", usage.prefill_requests);
  count("decode-requests", usage.decode_requests);
  count("queued", queued);
  count("decode-queued", usage.decode_queued_requests);
  count("prompt-tokens", usage.prompt_tokens_total);
  count("cached-prompt-tokens", usage.cached_tokens_total);
  count("generated", usage.generated_tokens_total);
  count("failed-transfers", usage.failed_transfers_total);
  count("evicted", usage.evicted_tokens_total);
  say("outcomes", Object.entries(usage.requests_total).map(([name, n]) => `${whole.format(n)} ${name}`).join(", "));

  const now = {
    seconds: performance.now() / 1000,
    prompt: usage.prompt_tokens_total,
    output: usage.generated_tokens_total,
    sent: ranks.reduce((sum, rank) => sum + rank.sent_bytes_total, 0),
  };
  const rate = (name) => (before ? Math.max(0, now[name] - before[name]) / (now.seconds - before.seconds) : 0);
  say("prompt-rate", pace(rate("prompt")));
  say("output-rate", pace(rate("output")));
  say("transfer-rate", `${bytes(rate("sent"))}/s`);
  draw("use", tokens.locked / total, 1);
  draw("hit", usage.recent_cache_hit_rate ?? 0, 1);
  draw("running", running);
  draw("queued", queued);
  draw("prompt", rate("prompt"));
  draw("output", rate("output"));
  draw("transfer", rate("sent"));
  before = now;
}

function draw(name, value, top = 0) {
  const kept = (series[name] ??= []);
  kept.push(value);
  if (kept.length > KEPT_SAMPLES) kept.shift();
  const svg = document.querySelector(`[data-series="${name}"]`);
  if (!svg.firstChild) {
    svg.setAttribute("preserveAspectRatio", "none");
    const base = svg.appendChild(document.createElementNS(svg.namespaceURI, "line"));
    for (const [at, to] of Object.entries({ x1: 0, y1: 29, x2: KEPT_SAMPLES, y2: 29 })) base.setAttribute(at, to);
    svg.appendChild(document.createElementNS(svg.namespaceURI, "polyline"));
  }
  const shown = Math.max(FEWEST_SAMPLES, kept.length), first = shown - kept.length;
  const highest = Math.max(top, ...kept, 1e-9);
  svg.setAttribute("viewBox", `0 0 ${shown - 1} 30`);
  const points = kept.map((v, at) => `${first + at},${(29 - 27 * (v / highest)).toFixed(1)}`);
  svg.lastChild.setAttribute("points", points.join(" "));
}

// The heat map ----------------------------------------------------------------------------------

// Where every rank keeps every page there is one owner of them all.
const ownerName = (pool, owner) => (pool.role !== "prefill" ? "its pool" : replicated ? "each rank" : `rank ${owner}`);

function renderPools(pools, capacity) {
  const home = $("pools");
  for (const table of [...home.children]) {
    if (!pools.some((pool) => pool.unit === table.dataset.unit)) table.remove();
  }
  for (const pool of pools) {
    const bins = pool.owners[0].free.length, shape = `${pool.owners.length}x${bins}`;
    let table = home.querySelector(`[data-unit="${pool.unit}"]`);
    if (!table || table.dataset.shape !== shape) {
      const made = makePool(pool, bins, shape);
      if (table) table.replaceWith(made); else home.append(made);
      table = made;
    }
    table.pool = pool;
    const size = pool.pages_per_bin === 1 ? "a page" : `${whole.format(pool.pages_per_bin)} pages`;
    table.caption.lastChild.textContent =
      `, ${whole.format(pool.physical_pages)} physical pages ${pool.role === "prefill" ? "on each rank" : "of its own"}, ${size} a square`;
    pool.owners.forEach((owner, row) => fillRow(table.tBodies[0].rows[row], pool, owner));
  }
  const sizes = new Set(pools.map((pool) => pool.pages_per_bin));
  say("bin-text", sizes.size === 1 && sizes.has(1) ? `one physical page of ${capacity.page_size} tokens` : "a range of physical pages");
  if (cursor) readOut();
}

function makePool(pool, bins, shape) {
  const table = element("table", "", { class: "pool", "data-unit": pool.unit, "data-shape": shape });
  const caption = table.createCaption();
  caption.append(pool.unit, element("span", "", { class: "quiet" }));
  const head = table.createTHead().insertRow();
  for (const name of ["owner", "pages", ...STATES.map((state) => WORDS[state])]) head.append(element("th", name, { scope: "col" }));
  const body = table.createTBody();
  for (const { owner } of pool.owners) {
    const row = body.insertRow();
    row.append(element("th", ownerName(pool, owner), { scope: "row" }));
    const cells = row.insertCell();
    cells.className = "cells";
    const strip = cells.appendChild(element("div", "", { tabindex: "0", role: "img" }));
    for (let bin = 0; bin < bins; bin += 1) strip.append(document.createElement("b"));
    for (const state of STATES) {
      const cell = row.insertCell();
      cell.dataset.state = state;
      cell.dataset.label = WORDS[state];
    }
  }
  return table;
}

function fillRow(row, pool, owner) {
  const strip = row.cells[1].firstChild;
  const totals = { locked: 0, cached: 0, free: 0 };
  for (let bin = 0; bin < strip.children.length; bin += 1) {
    const cell = strip.children[bin];
    const parts = STATES.map((state) => owner[state][bin]);
    STATES.forEach((state, at) => { totals[state] += parts[at]; });
    const key = parts.join();
    if (cell.dataset.counts !== key) {
      cell.dataset.counts = key;
      cell.style.background = fill(parts);
    }
  }
  for (const state of STATES) row.querySelector(`[data-state="${state}"]`).textContent = whole.format(totals[state]);
  const told = STATES.map((state) => `${whole.format(totals[state])} ${WORDS[state]}`).join(", ");
  strip.setAttribute("aria-label", `Pages of ${pool.unit}, ${ownerName(pool, owner.owner)}: ${told}. Arrow keys read the ranges.`);
}

// A square is filled from below, in the proportions of its pages.
function fill(parts) {
  const total = parts.reduce((sum, part) => sum + part, 0);
  const whose = parts.findIndex((part) => part === total);
  if (whose >= 0) return `var(--${STATES[whose]})`;
  const locked = (100 * parts[0]) / total, cached = locked + (100 * parts[1]) / total;
  return `linear-gradient(to top, var(--locked) ${locked}%, var(--cached) ${locked}% ${cached}%, var(--free) ${cached}%)`;
}

function pointAt(strip, bin) {
  if (cursor) cursor.strip.children[cursor.bin]?.classList.remove("at");
  cursor = { strip, bin };
  strip.children[bin].classList.add("at");
  readOut();
}

function readOut() {
  const { strip, bin } = cursor, table = strip.closest("table");
  if (!table) { cursor = null; return; }
  const pool = table.pool, owner = pool.owners[strip.closest("tr").sectionRowIndex];
  const first = bin * pool.pages_per_bin + 1, last = Math.min(first + pool.pages_per_bin - 1, pool.physical_pages);
  const range = first === last ? `physical page ${first}` : `physical pages ${first} to ${last}`;
  const told = STATES.map((state) => `${owner[state][bin]} ${WORDS[state]}`).join(", ");
  const text = `${pool.unit}, ${ownerName(pool, owner.owner)}, ${range}: ${told}`;
  if ($("readout").textContent !== text) say("readout", text);
}

$("pools").addEventListener("pointerover", (event) => {
  if (event.target.tagName === "B") pointAt(event.target.parentNode, [...event.target.parentNode.children].indexOf(event.target));
});
$("pools").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
  if (step === undefined || event.target.parentNode.className !== "cells") return;
  event.preventDefault();
  const here = cursor && cursor.strip === event.target ? cursor.bin : -1;
  pointAt(event.target, Math.max(0, Math.min(event.target.children.length - 1, here + step)));
});

// Tables ----------------------------------------------------------------------------------------

function fillTable(id, rows) {
  $(id).tBodies[0].replaceChildren(...rows.map(([name, ...values]) => {
    const row = document.createElement("tr");
    row.append(element("th", name, { scope: "row" }));
    for (const value of values) row.append(value instanceof Node ? value : element("td", value));
    return row;
  }));
}

function renderRanks(ranks) {
  fillTable("ranks", ranks.map((rank) => [
    `prefill-${rank.dp_rank}, rank ${rank.cp_rank}`,
    whole.format(rank.sent_pages_total),
    bytes(rank.sent_bytes_total),
    whole.format(rank.sent_descriptors_total),
    rank.sent_descriptors_total ? bytes(rank.sent_bytes_total / rank.sent_descriptors_total) : "none",
    bytes(rank.read_bytes_total),
    bytes(rank.scratch_bytes),
  ]));
}

function renderUnits(units, pools) {
  fillTable("units", units.map((unit) => {
    const pool = pools.find((one) => one.unit === unit.unit);
    return [
      unit.unit,
      element("td", unit.up ? "up" : "down", { class: unit.up ? "" : "down" }),
      String(unit.life),
      unit.up && pool ? pool.epoch : "none",
      unit.silent_seconds === null ? "none" : `${unit.silent_seconds.toFixed(1)} s ago`,
      unit.problems.join("; ") || "none",
    ];
  }));
}

loop();
