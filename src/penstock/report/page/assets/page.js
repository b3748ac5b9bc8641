const figures = JSON.parse(document.getElementById('figures').textContent);
const dark = matchMedia('(prefers-color-scheme: dark)');
const narrow = matchMedia('(max-width: 40rem)');
function layout(figure) {
  const ink = dark.matches ? '#e8e8e8' : '#1c1c1c', line = dark.matches ? '#3a3d42' : '#d8d8d8';
  const own = structuredClone(figure.layout);
  for (const axis of new Set(['xaxis', 'yaxis', ...Object.keys(own).filter(key => /^[xy]axis\d*$/.test(key))]))
    own[axis] = Object.assign({gridcolor: line, zerolinecolor: line, automargin: true}, own[axis]);
  return Object.assign({paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)', font: {color: ink, size: 12},
    margin: {l: 50, r: 15, t: 20, b: 50}, legend: {orientation: 'h', y: 1.02, yanchor: 'bottom'}, dragmode: false,
    hoverlabel: {align: 'left'}}, own);
}
// other figures leave scrolling and swiping to the page
const settings = figure => ({responsive: true, displayModeBar: false, scrollZoom: figure.layout.dragmode === 'pan'});
async function draw() {
  for (const figure of figures)
    await Plotly.react('figure-' + figure.key, figure.data, layout(figure), settings(figure));
}
// plotly reads lines and entities; here they become text, which nothing in a name can leave
function tell(text) {
  const place = document.getElementById('journey');
  place.replaceChildren();
  for (const line of text.split('<br>')) {
    if (place.hasChildNodes()) place.append(document.createElement('br'));
    place.append(line.replaceAll('&lt;', '<').replaceAll('&gt;', '>').replaceAll('&amp;', '&'));
  }
}
draw().then(() => {
  const line = document.getElementById('figure-timeline');
  if (line) {
    line.on('plotly_hover', event => tell(event.points[0].customdata));
    const journeys = figures.find(f => f.key === 'timeline').journeys;
    let at = -1;
    line.addEventListener('keydown', event => {
      const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
      if (!step) return;
      event.preventDefault();
      at = Math.min(journeys.length - 1, Math.max(0, at + step));
      tell(journeys[at]);
    });
  }
  document.body.dataset.drawn = 'yes';
});
dark.addEventListener('change', draw);
